"""The pictures: comparison with TRL, curves of the demo, phases of an Online DPO step."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.pictures.drawing import Scene, Theme, plain
from tools.pictures.recording import BESIDE_TRL, DEMO, RUNS

# What each phase of an Online DPO step allocates in addition to the weights of the policy.
_MEMORY = {
    "rollout": "KV cache",
    "score": "reward model",
    "reference": "reference model",
    "train": "activations, gradients",
    "step": "optimizer",
}


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
    axes.barh(places, shares, height=0.62, color=theme.accent)
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
        lane = 1 + place
        axes.barh(0, duration, left=left, height=0.7, color=color)
        axes.barh(lane, duration, left=left, height=0.7, color=color)
        note = f"{name}: {_MEMORY[name]}, {1000 * duration:.0f} ms ({duration / total:.0%})"
        after = left + duration < 0.6 * total
        axes.text(
            left + duration + 0.012 * total if after else left - 0.012 * total,
            lane,
            note,
            va="center",
            ha="left" if after else "right",
        )
        left += duration
    axes.set_yticks([0, *range(1, 1 + len(seconds))], ["one step", *[""] * len(seconds)], color=theme.text)
    axes.set_xlim(0, total)
    axes.set_ylim(5.6, -0.6)
    axes.set_xlabel("seconds")
    plain(axes, keep=("bottom",))


SCENES = {
    "beside-trl": Scene(BESIDE_TRL, (8.6, 3.6), beside_trl),
    "demo-curves": Scene(DEMO, (11.0, 2.5), demo_curves),
    "online-dpo-phases": Scene(DEMO, (8.6, 2.9), online_dpo_phases),
}
