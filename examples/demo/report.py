"""The results of a finished demo: the table, sampled responses side by side, and plots of the reward margins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from alignment.config.errors import OutputError
from alignment.reporting.formats import markdown_table
from examples.demo.data import Row
from examples.demo.folder import Settings
from examples.demo.grammar import Request
from examples.demo.verdict import Measured, answers, manner

_HEAD = ("", "preferred style", "correct", "mean reward", "training")


def table(measured: Sequence[Measured]) -> str:
    """Return a table with one row per model."""
    rows = [
        (m.title, f"{m.rates.warm:.3f}", f"{m.rates.answered:.3f}", f"{m.reward:.2f}", f"{m.seconds:.0f} s")
        for m in measured
    ]
    return markdown_table(_HEAD, rows)


def examples(requests: Sequence[Request], texts: Mapping[str, Sequence[str]]) -> str:
    """Return the requests with each model's response; ``texts`` maps titles to responses, possibly to more."""
    width = max(map(len, texts))
    blocks = []
    for number, request in enumerate(requests):
        lines = [f"  {title.ljust(width)}  {given[number]}" for title, given in texts.items()]
        blocks.append("\n".join([request.text, *lines]))
    return "\n\n".join(blocks)


def judged(
    requests: Sequence[Request], texts: Mapping[str, Sequence[str]], rewards: Mapping[str, Sequence[float]]
) -> list[Row]:
    """Return every sampled response with its style, correctness and reward."""
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
    """Return steps and reward margins from a run's ``log.jsonl``; lines without a margin are skipped."""
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    points = [(r["step"], r["rewards/margins"]) for r in records if r.get("rewards/margins") is not None]
    return [step for step, _ in points], [margin for _, margin in points]


def plot_margins(logs: Mapping[str, Path], path: Path) -> None:
    """Plot the margins of several runs side by side, each with its own scale, since betas differ.

    Raises:
        OutputError: if the file cannot be written.
    """
    # Not pyplot: it keeps figures alive and looks for a display. A plain figure is drawn with Agg.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(logs), 3.2), layout="constrained")
    for axes, (title, log) in zip(figure.subplots(1, len(logs), squeeze=False)[0], logs.items()):
        axes.plot(*margins(log))
        axes.set(title=title, xlabel="step", ylabel="rewards/margins")
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise OutputError(f"output_dir: cannot write {path}: {error}") from error


def explained(settings: Settings, accuracy: float) -> str:
    """Explain the table's columns; ``accuracy`` is the reward model's on held-out pairs."""
    return (
        f"Each model samples one response to each of {settings.held_out} held-out requests at temperature "
        f"{settings.temperature:g}; seed {settings.seed}. The preferred style is warm. A response is correct if it "
        "answers the request with the right fact.\n\n"
        "Mean reward: the mean score of these responses by the reward model that Online DPO was trained with. The "
        f"reward model was trained on {settings.reward.rows} pairs of a warm and a curt response, both of them "
        "correct, to score the warm one higher, so it has learned style, not correctness. Only differences of "
        "rewards are meaningful: of two responses whose rewards differ by 1, the higher one is expected to be "
        "preferred in 73 of 100 cases; with a difference of 3, in 95. On such pairs for the "
        f"{settings.held_out} held-out requests, its accuracy is {accuracy:.1%}."
    )


def write_page(path: Path, meaning: str, rates: str, verdict: str, samples: str) -> None:
    """Write ``demo.md``: explanation, table, verdict, responses, and a link to ``margins.png``.

    Raises:
        OutputError: if it cannot be written.
    """
    parts = ["# Demo", meaning, rates, verdict, "## Sampled responses", f"```\n{samples}\n```"]
    parts += ["## Reward margins", "![reward margins by step](margins.png)"]
    try:
        path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"output_dir: cannot write {path}: {error}") from error
