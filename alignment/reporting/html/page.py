"""Render reports of one run or of several. The templates escape every value."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from alignment.reporting.html.content import RunContent
from alignment.reporting.html.drawing import draw
from alignment.reporting.html.series import Chart, charts, compared
from alignment.reporting.html.theme import declarations
from alignment.reporting.log_reading import is_mean, number
from alignment.reporting.report import duration, gibibytes

PAGE = "report.html"
TONES = {
    "finished": "good", "starting": "info", "running": "info", "preempted": "warn", "stopped": "warn",
    "failed": "bad", "lost": "bad",
}  # fmt: skip
# Metrics of the tiles at the top, in order of importance.
_TILES = {
    "loss": "Loss", "eval_loss": "Evaluation loss", "rewards/margins": "Reward margin",
    "rewards/accuracies": "Reward accuracy", "eval_rewards/accuracies": "Evaluation accuracy",
    "eval_win_rate": "Win rate", "objective/scores": "Score", "kl": "KL", "objective/kl": "KL",
    "mean_token_accuracy": "Token accuracy", "completions/mean_length": "Completion length",
    "grad_norm": "Gradient norm",
}  # fmt: skip
_MOST_TILES = 6
_NOT_SHOWN = ("runtime", "_per_second")


def render(content: RunContent) -> str:
    """Render the page of one run."""
    template = _environment().get_template("run.html")
    return template.render(
        run=content,
        title=f"{content.name}: run report",
        themes=declarations(),
        tone=TONES.get(content.state, "plain"),
        tiles=_tiles(content),
        charts=_drawn(charts(content.history, content.marks)),
        phases=_phases(content),
    )


def render_comparison(contents: Sequence[RunContent]) -> str:
    """Render the page that compares several runs."""
    names = distinct([content.name for content in contents], [content.folder for content in contents])
    options = dict.fromkeys(option.name for content in contents for option in content.options)
    values = [{option.name: option.value for option in content.options} for content in contents]
    defaults = {one.name: one.default for content in contents for one in content.options}
    rows = [(name, [each.get(name, defaults[name]) for each in values]) for name in sorted(options)]
    differing = [(name, each) for name, each in rows if len(set(each)) > 1]
    template = _environment().get_template("comparison.html")
    return template.render(
        title=f"Comparison of {len(contents)} runs",
        themes=declarations(),
        runs=[
            {"name": name, "run": content, "tone": TONES.get(content.state, "plain"), "color": color}
            for color, (name, content) in enumerate(zip(names, contents), start=1)
        ],
        facts=_side_by_side([dict(content.facts) for content in contents]),
        options=differing,
        metrics=[
            (title, rows)
            for title, rows in (
                ("Training", _side_by_side([_shown(content.train) for content in contents])),
                ("Evaluation", _side_by_side([_shown(content.evaluation) for content in contents])),
            )
            if rows
        ],
        charts=_drawn(compared(dict(zip(names, (content.history for content in contents))))),
        drawn=contents[0].drawn,
    )


def distinct(names: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Return distinct names: runs with the same name are named by their folders."""
    return [name if names.count(name) == 1 else folder for name, folder in zip(names, folders)]


def _tiles(content: RunContent) -> list[tuple[str, str, str]]:
    """Return label, last value, and first value of each tile."""
    found: dict[str, tuple[str, str, str]] = {}
    for metric, label in _TILES.items():
        values = [value for entry in content.history if (value := number(entry.get(metric))) is not None]
        if values and label not in found:
            found[label] = (label, _compact(values[-1]), f"from {_compact(values[0])}" if len(values) > 1 else "")
    return list(found.values())[:_MOST_TILES]


def _phases(content: RunContent) -> list[dict[str, Any]]:
    total = sum(phase.seconds for phase in content.phases) or 1.0
    most = max((phase.peak_bytes for phase in content.phases), default=0.0) or 1.0
    ordered = sorted(content.phases, key=lambda phase: -phase.seconds)
    return [
        {
            "name": phase.name,
            "entries": f"{phase.entries:,.0f}",
            "time": duration(phase.seconds),
            "share": 100 * phase.seconds / total,
            "rate": f"{phase.tokens / phase.seconds:,.0f}" if phase.tokens and phase.seconds else "",
            "memory": gibibytes(phase.peak_bytes),
            "memory_share": 100 * phase.peak_bytes / most,
        }
        for phase in ordered
    ]


def _drawn(found: Sequence[Chart]) -> list[dict[str, Any]]:
    # matplotlib escapes the labels of axes; nothing else in a drawing is text.
    return [{"chart": chart, "svg": Markup(draw(chart, place))} for place, chart in enumerate(found)]


def _shown(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Format metrics, without sums, counts and speeds."""
    return {
        name: _number(value)
        for name, each in metrics.items()
        if (value := number(each)) is not None and is_mean(name) and not name.endswith(_NOT_SHOWN)
    }


def _side_by_side(columns: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "") for column in columns]) for name in names]


def _number(value: float) -> str:
    return f"{value:.5g}".replace("-", "−")


def _compact(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


def _breakable(name: str) -> Markup:
    """Escape a name, and allow line breaks after its underscores and slashes."""
    return Markup(re.sub(r"([_/])", r"\1<wbr>", str(escape(name))))


def _percent(value: float) -> str:
    return "<1%" if 0 < value < 0.5 else f"{value:.0f}%"


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = _shown
    environment.filters["percent"] = _percent
    environment.filters["short"] = _compact
    environment.filters["breakable"] = _breakable
    environment.filters["count"] = lambda value: f"{value:,}"
    return environment
