"""The curves of a report: panels of metrics, drawn by matplotlib as inline SVG in the colors of the style sheet."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from alignment.reporting.formats import number

Point = tuple[float, float]
Mark = tuple[int, str]  # a step to mark, and its label
History = Sequence[Mapping[str, Any]]
COLORS = 8  # number of curve colors in the style sheet
_MOST_POINTS = 500  # per curve; more are indistinguishable at the size of a chart
_FEW = 24  # curves with at most this many points have markers
# Colors that matplotlib writes, and the style sheet's properties in their place.
_SERIES = [f"#a0000{number}" for number in range(1, COLORS + 1)]
_TEXT, _GRID, _MARK = "#b00001", "#b00002", "#b00003"
_PROPERTIES = {_TEXT: "muted", _GRID: "grid", _MARK: "mark"}
_PROPERTIES |= {color: f"series-{number}" for number, color in enumerate(_SERIES, 1)}
_SIDES = ("chosen", "rejected")
_ACCURACY = "share of pairs in which the chosen completion has the higher reward"
# Title, explanation, and metrics with their labels; the label of a single one is empty.
_PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Loss", "", {"loss": ""}),
    ("Rewards", "of the chosen and the rejected completions", {f"rewards/{side}": side for side in _SIDES}),
    ("Reward margin", "chosen minus rejected", {"rewards/margins": ""}),
    ("Reward accuracy", _ACCURACY, {"rewards/accuracies": ""}),
    ("Token accuracy", "", {"mean_token_accuracy": ""}),
    ("KL", "divergence of the policy from the reference", {"kl": "", "objective/kl": ""}),
    ("Score", "mean score of the generated completions", {"objective/scores": ""}),
    ("Score margin", "best minus worst completion of a prompt", {"objective/scores_margin": ""}),
    ("Win rate", "share of prompts for which the judge prefers the policy", {"win_rate": ""}),
    ("Completion length", "tokens", {f"completions/mean_{one}length": one.strip("_") for one in ("", "terminated_")}),
    ("Log-probabilities", "of the completions", {f"logps/{side}": side for side in _SIDES}),
    ("Entropy", "of the next token", {"entropy": ""}),
    ("Learning rate", "", {"learning_rate": ""}),
    ("Gradient norm", "before clipping", {"grad_norm": ""}),
)


class Series(NamedTuple):
    """One curve: its name in the legend, (step, value) points, the number of its color, and whether it is dashed."""

    label: str
    points: Sequence[Point]
    color: int
    evaluation: bool = False


class Chart(NamedTuple):
    """A panel with at least one curve, and steps to mark."""

    title: str
    about: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()

    @property
    def summary(self) -> str:
        """The chart in one sentence, for screen readers."""
        ends = [(one.label, *one.points[0], *one.points[-1]) for one in self.series]
        said = [f"{label and f'{label}: '}from {begin:.4g} at step {first:g} to {end:.4g} at step {last:g}"
                for label, first, begin, last, end in ends]  # fmt: skip
        return f"{self.title}. {'; '.join(said)}."

    @property
    def svg(self) -> Markup:
        """The drawing; matplotlib escapes the labels of axes, and nothing else in it is text."""
        return Markup(_drawn(self))


def charts(history: History, marks: Sequence[Mark] = ()) -> list[Chart]:
    """Return the charts of one run from the entries of its log, one for each panel with logged values."""
    found = ((title, about, list(_curves(metrics, history))) for title, about, metrics in _PANELS)
    return [Chart(title, about, series, marks) for title, about, series in found if series]


def compared(histories: Sequence[History], names: Sequence[str]) -> list[Chart]:
    """Return the charts of several runs, one for each metric that any of them has logged, with a curve per run."""
    found, entries = [], [entry for history in histories for entry in history]
    for panel, about, metrics in _PANELS:
        for metric, label in metrics.items():
            for name, said in (metric, ""), *_evaluations(entries, metric):
                each = [(run, _points(history, name)) for run, history in zip(names, histories)]
                curves = [Series(run, values, color) for color, (run, values) in enumerate(each, start=1) if values]
                if curves:
                    found.append(Chart(", ".join(filter(None, (panel, label, said))), about, curves))
    return found


def _curves(metrics: Mapping[str, str], history: History) -> Iterator[Series]:
    several, color = sum(bool(_points(history, metric)) for metric in metrics) > 1, 0
    for metric, label in metrics.items():
        values, evaluated = _points(history, metric), _evaluations(history, metric)
        label = label if several else ""
        color += bool(values or evaluated)
        if values:
            yield Series(label or ("training" if evaluated else ""), values, color)
        for name, said in evaluated:
            color += not (several and said == "evaluation")
            yield Series(f"{label}, {said}" if label else said, _points(history, name), color, evaluation=True)


def _evaluations(history: History, metric: str) -> list[tuple[str, str]]:
    """Name and label of a metric in evaluations: ``eval_loss``, or ``eval_NAME_loss`` for a named set."""
    found = dict.fromkeys(name for entry in history for name in entry if name.startswith("eval_"))
    # Each evaluation logs its runtime; without it, eval_nll_loss could be the loss of a set called nll.
    sets = dict.fromkeys(["eval", *(name.removesuffix("_runtime") for name in found if name.endswith("_runtime"))])
    labels = {f"{one}_{metric}": f"evaluation ({one[5:]})" if one[5:] else "evaluation" for one in sets}
    return [(name, label) for name, label in labels.items() if name in found and _points(history, name)]


def _points(history: History, name: str) -> list[Point]:
    """Step and value of each entry that has the metric, some of them if there are too many."""
    found = [(float(entry["step"]), value) for entry in history if (value := number(entry.get(name))) is not None]
    return found[:: -(len(found) // _MOST_POINTS + 1)][::-1]  # with the last one


def _drawn(chart: Chart) -> str:
    # Not pyplot, which keeps global state: open figures and the selected GUI backend.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": chart.title, "font.size": 10}
    with rc_context(settings):
        figure = Figure(figsize=(4.7, 2.35), layout="constrained")
        axes = figure.add_subplot()
        for series in chart.series:
            axes.plot(
                *zip(*series.points),
                color=_SERIES[(series.color - 1) % COLORS],
                linewidth=1.6,
                linestyle=(0, (4, 2)) if series.evaluation else "solid",
                marker="o" if len(series.points) <= _FEW else None,
                markersize=3.2,
            )
        for step, _ in chart.marks:
            axes.axvline(step, color=_MARK, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=4, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}".replace("-", "−")))
        axes.tick_params(length=0, colors=_TEXT, pad=5)
        axes.set_xlabel("step", color=_TEXT, labelpad=3)
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set_color(_GRID)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # not unique on a page
    for color, name in _PROPERTIES.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg
