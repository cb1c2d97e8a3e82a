"""The curves of a report: panels of metrics, and their points from the entries of a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from alignment.reporting.log_reading import number

Point = tuple[float, float]
_EVALUATION, _RUNTIME = "eval_", "_runtime"
_LENGTH, _TERMINATED = "completions/mean_length", "completions/mean_terminated_length"
_MOST_POINTS = 500  # per curve; more are indistinguishable at the size of a chart


class Panel(NamedTuple):
    """A chart: its title, an explanation, and its metrics with their labels; the label of a single one is empty."""

    title: str
    about: str
    metrics: Mapping[str, str]


PANELS = (
    Panel("Loss", "", {"loss": ""}),
    Panel("Rewards", "of the chosen and the rejected completions", {
        "rewards/chosen": "chosen", "rewards/rejected": "rejected",
    }),
    Panel("Reward margin", "chosen minus rejected", {"rewards/margins": ""}),
    Panel("Reward accuracy", "share of pairs in which the chosen completion has the higher reward", {
        "rewards/accuracies": "",
    }),
    Panel("Token accuracy", "", {"mean_token_accuracy": ""}),
    Panel("KL", "divergence of the policy from the reference", {"kl": "", "objective/kl": ""}),
    Panel("Score", "mean score of the generated completions", {"objective/scores": ""}),
    Panel("Score margin", "best minus worst completion of a prompt", {"objective/scores_margin": ""}),
    Panel("Win rate", "share of prompts for which the judge prefers the policy", {"win_rate": ""}),
    Panel("Completion length", "tokens", {
        _LENGTH: "all", _TERMINATED: "terminated",
    }),
    Panel("Log-probabilities", "of the completions", {"logps/chosen": "chosen", "logps/rejected": "rejected"}),
    Panel("Entropy", "of the next token", {"entropy": ""}),
    Panel("Learning rate", "", {"learning_rate": ""}),
    Panel("Gradient norm", "before clipping", {"grad_norm": ""}),
)  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        label: its name in the legend.
        points: step and value, in order.
        color: number of its color, from 1.
        evaluation: whether it is measured on an evaluation set.
    """

    label: str
    points: Sequence[Point]
    color: int
    evaluation: bool = False


@dataclass(frozen=True)
class Chart:
    """A panel with its curves.

    Attributes:
        title, about: see :class:`Panel`.
        series: at least one.
        marks: steps to mark, with a label each.
    """

    title: str
    about: str
    series: Sequence[Series]
    marks: Sequence[tuple[int, str]] = ()

    def summary(self) -> str:
        """Describe the chart in one sentence, for screen readers."""
        parts = []
        for one in self.series:
            (first, begin), (last, end) = one.points[0], one.points[-1]
            name = f"{one.label}: " if one.label else ""
            if len(one.points) == 1:
                parts.append(f"{name}{begin:.4g} at step {first:g}")
            else:
                parts.append(f"{name}from {begin:.4g} at step {first:g} to {end:.4g} at step {last:g}")
        return f"{self.title}. {'; '.join(parts)}."


def charts(history: Sequence[Mapping[str, Any]], marks: Sequence[tuple[int, str]] = ()) -> list[Chart]:
    """Return the charts of one run, one for each panel with logged values.

    Args:
        history: entries of the log, each with its ``step``.
        marks: steps to mark in each chart.
    """
    found = ((panel, list(_of_run(panel, history))) for panel in PANELS)
    return [Chart(panel.title, panel.about, series, marks) for panel, series in found if series]


def _of_run(panel: Panel, history: Sequence[Mapping[str, Any]]) -> Iterator[Series]:
    trained = {metric: points(history, metric) for metric in panel.metrics}
    if trained.get(_TERMINATED) == trained.get(_LENGTH):  # all completions terminated
        trained.pop(_TERMINATED, None)
    several, color = sum(map(bool, trained.values())) > 1, 0
    for metric, values in trained.items():
        label = panel.metrics[metric] if several or metric != _LENGTH else ""
        evaluated = {name: points(history, name) for name in _evaluations(history, metric)}
        if not values and not evaluated:
            continue
        color += 1
        if values:
            yield Series(label or ("training" if evaluated else ""), values, color)
        for name, found in evaluated.items():
            which, said = _evaluation(name, metric)
            color += 0 if several and not which else 1
            yield Series(f"{label}, {said}" if label else said, found, color, evaluation=True)


def compared(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Chart]:
    """Return the charts of several runs, one for each metric that any of them has logged, with a curve per run.

    Args:
        histories: entries of the logs, by the name of the run.
    """
    found = []
    for panel in PANELS:
        for metric, label in panel.metrics.items():
            names = dict.fromkeys(name for each in histories.values() for name in _evaluations(each, metric))
            for name in (metric, *names):
                curves = [
                    Series(run, values, color)
                    for color, (run, history) in enumerate(histories.items(), start=1)
                    if (values := points(history, name))
                ]
                if curves:
                    title = f"{panel.title}, {label}" if label else panel.title
                    if name != metric:
                        title += f", {_evaluation(name, metric)[1]}"
                    found.append(Chart(title, panel.about, curves))
    return found


def _evaluation(name: str, metric: str) -> tuple[str, str]:
    """Return the name of the evaluation set, empty for an unnamed one, and the label of its curve."""
    which = name[len(_EVALUATION) : len(name) - len(metric)].rstrip("_")
    return which, f"evaluation ({which})" if which else "evaluation"


def _evaluations(history: Sequence[Mapping[str, Any]], metric: str) -> list[str]:
    """Return the names of a metric in evaluations: ``eval_loss``, or ``eval_NAME_loss`` for a named set."""
    found = dict.fromkeys(name for entry in history for name in entry if name.startswith(_EVALUATION))
    # Each evaluation logs its runtime; without it, eval_nll_loss could be the loss of a set called nll.
    sets = [name.removesuffix(_RUNTIME) for name in found if name.endswith(_RUNTIME)]
    return [name for each in dict.fromkeys([_EVALUATION[:-1], *sets]) if (name := f"{each}_{metric}") in found]


def points(history: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    """Return step and value of each entry that has the metric, averaging neighbors if there are too many."""
    found = [
        (step, value)
        for entry in history
        if (value := number(entry.get(name))) is not None and (step := number(entry.get("step"))) is not None
    ]
    size = -(-len(found) // _MOST_POINTS)
    if size <= 1:
        return found
    groups = [found[start : start + size] for start in range(0, len(found), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
