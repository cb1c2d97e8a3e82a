"""What a finished demo shows: the table, sampled answers side by side, and the curves of the reward margin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from alignment.config.errors import OutputError
from alignment.reporting.report import markdown_table
from examples.demo.data import Row
from examples.demo.folder import Settings
from examples.demo.grammar import Request
from examples.demo.verdict import Measured, answers, manner

_HEAD = ("", "warm answers", "requests answered", "mean reward", "training")


def table(measured: Sequence[Measured]) -> str:
    """One row for each model."""
    rows = [
        (m.title, f"{m.rates.warm:.3f}", f"{m.rates.answered:.3f}", f"{m.reward:.2f}", f"{m.seconds:.0f} s")
        for m in measured
    ]
    return markdown_table(_HEAD, rows)


def examples(requests: Sequence[Request], texts: Mapping[str, Sequence[str]]) -> str:
    """The requests, each with every model's answer to it; ``texts`` has the answers by title, and may hold more."""
    width = max(map(len, texts))
    blocks = []
    for number, request in enumerate(requests):
        lines = [f"  {title.ljust(width)}  {given[number]}" for title, given in texts.items()]
        blocks.append("\n".join([request.text, *lines]))
    return "\n\n".join(blocks)


def judged(
    requests: Sequence[Request], texts: Mapping[str, Sequence[str]], rewards: Mapping[str, Sequence[float]]
) -> list[Row]:
    """Every sampled answer with what the rules say of it, and its score by the reward model."""
    return [
        {
            "model": title,
            "request": request.text,
            "answer": text,
            "manner": manner(request, text),
            "answers": answers(request, text),
            "reward": round(reward, 4),
        }
        for title, given in texts.items()
        for request, text, reward in zip(requests, given, rewards[title], strict=True)
    ]


def margins(log: Path) -> tuple[list[int], list[float]]:
    """Steps and reward margins of a run's ``log.jsonl``; lines without a margin are passed over."""
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    points = [(r["step"], r["rewards/margins"]) for r in records if r.get("rewards/margins") is not None]
    return [step for step, _ in points], [margin for _, margin in points]


def plot_margins(logs: Mapping[str, Path], path: Path) -> None:
    """Draw the curves of several runs, by title, side by side: each has a scale of its own, for betas differ.

    Raises:
        OutputError: the file cannot be written.
    """
    # Not pyplot: it keeps figures and looks for a window system. A figure alone draws with Agg.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(logs), 3.2), layout="constrained")
    for axes, (title, log) in zip(figure.subplots(1, len(logs), squeeze=False)[0], logs.items()):
        axes.plot(*margins(log))
        axes.set(title=title, xlabel="step", ylabel="rewards/margins")
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise OutputError(f"output_dir: could not write {path}: {error}") from error


def explained(settings: Settings, accuracy: float) -> str:
    """What the table's columns mean; ``accuracy`` is the reward model's on held-out pairs."""
    return (
        f"One answer to each of {settings.held_out} held-out requests, sampled from the saved models at temperature "
        f"{settings.temperature:g}; seed {settings.seed}. Warm is the preferred manner.\n\n"
        "Mean reward: of the same answers, by the reward model that Online DPO was trained with. It learned from "
        f"{settings.reward.rows} pairs of a warm and a curt answer, neither of them false, to score the warm one "
        "higher: so it knows of manner, and nothing of truth. Only differences count: of two answers whose rewards "
        "are 1 apart, it expects the higher one to be preferred in 73 cases of 100; 3 apart, in 95. It ranks "
        f"{accuracy:.1%} of {settings.held_out} such pairs of answers to the held-out requests rightly."
    )


def write_page(path: Path, meaning: str, rates: str, verdict: str, samples: str) -> None:
    """Write ``demo.md``: what was measured, the table, the verdict, the answers, and ``margins.png`` beside it.

    Raises:
        OutputError: it cannot be written.
    """
    parts = ["# Demo", meaning, rates, verdict, "## Sampled answers", f"```\n{samples}\n```"]
    parts += ["## Reward margins", "![reward margins by step](margins.png)"]
    try:
        path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"output_dir: could not write {path}: {error}") from error
