"""Themes, and the SVG file of one scene in one theme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Theme:
    """Colors of a picture on a light or a dark page; the background stays transparent."""

    text: str
    faint: str
    grid: str
    accent: str
    other: str
    series: tuple[str, ...]


THEMES = {
    "light": Theme(
        "#1f2328", "#59636e", "#d9dee3", "#0969da", "#c4ccd4", ("#0969da", "#1a7f37", "#bc4c00", "#8250df")
    ),
    "dark": Theme("#e6edf3", "#9198a1", "#3d444d", "#4493f8", "#545d68", ("#4493f8", "#3fb950", "#db8b3c", "#ab7df8")),
}


@dataclass(frozen=True)
class Scene:
    """One picture: its recorded data, its size in inches, and the function that paints it."""

    data: str
    size: tuple[float, float]
    paint: Callable[[Figure, dict[str, Any], Theme], None]


def draw(path: Path, scene: Scene, data: dict[str, Any], theme: str) -> None:
    """Paint ``scene`` and write it as an SVG file that is identical whenever the data is."""
    colors = THEMES[theme]
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": path.stem,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10,
        "text.color": colors.text,
        "axes.labelcolor": colors.faint,
        "axes.titlecolor": colors.text,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.edgecolor": colors.grid,
        "xtick.color": colors.faint,
        "ytick.color": colors.faint,
        "grid.color": colors.grid,
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=scene.size, layout="constrained")
        scene.paint(figure, data, colors)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})


def plain(axes: Axes, *, keep: tuple[str, ...] = ()) -> None:
    """Remove tick marks, and all spines except those in ``keep``."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
    axes.tick_params(length=0)
