"""The pictures of the documentation, drawn from recorded data.

``python -m tools.pictures`` draws every picture below ``docs/pictures/`` in a light and a dark version.
``python -m tools.pictures --record outputs/demo`` first records the runs of ``make demo``.
The recorded data is in ``docs/pictures/data/``: ``demo.json``, written by ``--record``, and ``beside_trl.json``, the
results of ``benchmarks/side_by_side.py``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
RUNS = {"kto": "KTO", "kto_lora": "KTO, LoRA", "cpo": "CPO", "online_dpo": "Online DPO"}
_CURVES = ("rewards/margins", "rewards/accuracies", "objective/scores")
_MODEL_ROW = re.compile(r"^\| (before|after [^|]+?) +\| +([\d.]+) \| +([\d.]+) \| +(-?[\d.]+) \|", re.MULTILINE)


class Theme(NamedTuple):
    """Colors of a picture on a light or a dark page; the background stays transparent."""

    text: str
    faint: str
    grid: str
    other: str
    series: tuple[str, ...]


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#d9dee3", "#c4ccd4", ("#0969da", "#1a7f37", "#bc4c00", "#8250df")),
    "dark": Theme("#e6edf3", "#9198a1", "#3d444d", "#545d68", ("#4493f8", "#3fb950", "#db8b3c", "#ab7df8")),
}


class Scene(NamedTuple):
    """One picture: its recorded data, its size in inches, and the function that paints it."""

    data: str
    size: tuple[float, float]
    paint: Callable[[Figure, dict[str, Any], Theme], None]


def draw(path: Path, scene: Scene, data: dict[str, Any], theme: str) -> None:
    """Paint ``scene`` and write it as an SVG file that is identical whenever the data is."""
    colors = THEMES[theme]
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.size": 10}
    settings |= {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}
    settings |= {"axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left"}
    settings |= dict.fromkeys(("text.color", "axes.titlecolor"), colors.text)
    settings |= dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), colors.faint)
    settings |= dict.fromkeys(("axes.edgecolor", "grid.color"), colors.grid)
    with mpl.rc_context(settings):
        figure = Figure(figsize=scene.size, layout="constrained")
        scene.paint(figure, data, colors)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})


def plain(axes: Axes, *, keep: tuple[str, ...] = ()) -> None:
    """Remove tick marks, and all spines except those in ``keep``."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
    axes.tick_params(length=0)


# What each phase of an Online DPO step allocates in addition to the weights of the policy.
_MEMORY = {"rollout": "KV cache", "score": "reward model", "reference": "reference model"}
_MEMORY |= {"train": "activations, gradients", "step": "optimizer"}


def beside_trl(figure: Figure, data: dict[str, Any], theme: Theme) -> None:
    """Step time and memory of each method as a share of TRL's, for full fine-tuning and for LoRA."""
    rows = data["rows"]
    titles = [f"{row['method']}, {row['training']}" for row in rows]
    time, memory = figure.subplots(1, 2, sharey=True)
    _shares(time, titles, [1 / row["times_faster"] for row in rows], theme)
    _shares(memory, titles, [row["memory_share"] for row in rows], theme)
    for place, row in enumerate(rows):
        time.text(1.02, place, f"{row['times_faster']:.1f}× faster", va="center", color=theme.text)
        memory.text(1.02, place, f"{row['memory_share']:.0%} of TRL", va="center", color=theme.text)
    time.invert_yaxis()  # shared: the first row comes first in both
    time.set_title("Step time (TRL = 1)")
    memory.set_title("Memory (TRL = 1)")


def _shares(axes: Axes, titles: list[str], shares: list[float], theme: Theme) -> None:
    places = range(len(titles))
    axes.barh(places, [1.0] * len(titles), height=0.62, color=theme.other, alpha=0.45)
    axes.barh(places, shares, height=0.62, color=theme.series[0])
    axes.set_yticks(places, titles, color=theme.text)
    axes.set_xlim(0, 1.36)
    axes.set_xticks([0, 0.5, 1.0])
    plain(axes)


def demo_curves(figure: Figure, data: dict[str, Any], theme: Theme) -> None:
    """Reward margins of the demo's runs, and the reward of the completions that Online DPO generates."""
    panels = [(name, "rewards/margins", f"{RUNS[name]}\nreward margin") for name in RUNS]
    panels.append(("online_dpo", "objective/scores", "Online DPO\nmean reward"))
    grid = figure.subplots(1, len(panels))
    for place, (axes, (name, metric, title)) in enumerate(zip(grid, panels, strict=True)):
        run = data["runs"][name]
        axes.plot(run["step"], run["curves"][metric], color=theme.series[min(place, 3)], linewidth=2)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(axis="y", linewidth=0.8)
        axes.margins(x=0.02)
        plain(axes, keep=("bottom",))


def online_dpo_phases(figure: Figure, data: dict[str, Any], theme: Theme) -> None:
    """One Online DPO step of the demo: the duration of each phase and what it allocates."""
    phases = data["runs"]["online_dpo"]["phases"]
    steps = data["runs"]["online_dpo"]["step"][-1]
    seconds = {name: phases[name]["seconds"] / steps for name in _MEMORY}
    total = sum(seconds.values())
    axes = figure.subplots()
    left = 0.0
    for place, (name, duration) in enumerate(seconds.items()):
        color = theme.series[place % len(theme.series)]
        for lane in (0, 1 + place):
            axes.barh(lane, duration, left=left, height=0.7, color=color)
        note = f"{name}: {_MEMORY[name]}, {1000 * duration:.0f} ms ({duration / total:.0%})"
        after = left + duration < 0.6 * total  # else the text is before the bar
        where = left + duration + 0.012 * total if after else left - 0.012 * total
        axes.text(where, 1 + place, note, va="center", ha="left" if after else "right")
        left += duration
    axes.set_yticks([0, *range(1, 1 + len(seconds))], ["one step", *[""] * len(seconds)], color=theme.text)
    axes.set_xlim(0, total)
    axes.set_ylim(5.6, -0.6)
    axes.set_xlabel("seconds")
    plain(axes, keep=("bottom",))


SCENES = {
    "beside-trl": Scene("beside_trl.json", (8.6, 3.6), beside_trl),
    "demo-curves": Scene("demo.json", (11.0, 2.5), demo_curves),
    "online-dpo-phases": Scene("demo.json", (8.6, 2.9), online_dpo_phases),
}


def load(name: str) -> dict[str, Any]:
    """The recorded data in ``docs/pictures/data/NAME``."""
    data: dict[str, Any] = json.loads((PICTURES / "data" / name).read_text(encoding="utf-8"))
    return data


def record_demo(folder: Path) -> dict[str, Any]:
    """The table of a finished demo, and for each run its curves over ``step`` and the costs of each phase."""
    rows = _MODEL_ROW.findall((folder / "demo.md").read_text(encoding="utf-8"))
    models = {title: dict(zip(("preferred", "correct", "reward"), map(float, values))) for title, *values in rows}
    runs = {}
    for name in RUNS:
        records = [json.loads(line) for line in (folder / name / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        steps = [record for record in records if "loss" in record]
        known = [key for key in _CURVES if all(record.get(key) is not None for record in steps)]
        curves = {key: [round(record[key], 4) for record in steps] for key in known}
        (end,) = (record["phases"] for record in records if record.get("event") == "end")
        costs = {phase: {key: cost[key] for key in ("seconds", "peak_bytes")} for phase, cost in end.items()}
        runs[name] = {"step": [record["step"] for record in steps], "curves": curves, "phases": costs}
    return {"models": models, "runs": runs}


def main(arguments: list[str] | None = None) -> None:
    """Record the demo if requested, then draw every picture in every theme."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description="Draw the documentation's pictures.")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="output folder of `make demo` to record first")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder to write to (default: docs/pictures)")
    options = parser.parse_args(arguments)
    if options.record is not None:
        text = json.dumps(record_demo(options.record), indent=1) + "\n"
        (PICTURES / "data" / "demo.json").write_text(text, encoding="utf-8")
    for name, scene in SCENES.items():
        for theme in THEMES:
            draw(options.out / f"{name}-{theme}.svg", scene, load(scene.data), theme)


if __name__ == "__main__":
    main()
