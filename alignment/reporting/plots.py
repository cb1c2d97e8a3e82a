"""Curves of a run, from its log, as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment.config.errors import OutputError

# Panels in their order, each with the metrics drawn in it; what a method does not log is left out.
_PANELS: dict[str, tuple[str, ...]] = {
    "loss": ("loss", "eval_loss"),
    "rewards": ("rewards/chosen", "rewards/rejected", "rewards/margins", "eval_rewards/margins"),
    "accuracy": ("rewards/accuracies", "eval_rewards/accuracies", "mean_token_accuracy", "eval_mean_token_accuracy"),
    "kl": ("kl", "eval_kl"),
    "entropy": ("entropy", "eval_entropy"),
    "gradient norm": ("grad_norm",),
}
_WIDTH, _HEIGHT = 4.2, 2.8  # inches of one panel


def draw_history(history: Sequence[Mapping[str, Any]], path: Path, title: str) -> bool:
    """Draw what was logged over the steps.

    Args:
        history: entries with ``step`` and metrics.
        path: the PNG to write.
        title: above the panels.

    Returns:
        Whether there was anything to draw.

    Raises:
        OutputError: the file cannot be written.
    """
    panels = {panel: curves for panel, names in _PANELS.items() if (curves := _curves(history, names))}
    if not panels:
        return False
    # Not pyplot: it keeps figures and a window system's state, and a library has no business with either.
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    figure.suptitle(title, parse_math=False)  # a name may hold a dollar sign
    for place, (panel, curves) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(rows, columns, place)
        for name, points in curves.items():
            axes.plot(*zip(*points), label=name, marker="o" if len(points) < 20 else None, markersize=3)
        axes.set_title(panel, fontsize="medium")
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend(fontsize="x-small")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise OutputError(f"output_dir: could not write {path}: {error}") from error
    return True


def _curves(history: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    curves = {name: [(e["step"], e[name]) for e in history if e.get(name) is not None] for name in names}
    return {name: points for name, points in curves.items() if points}
