"""Advice about a run that can go on as it is, for methods to choose from: what experience says about its settings.

Pure: options and counts in, sentences out. What is *wrong* is refused where the options are checked.
"""

from __future__ import annotations

import math
from dataclasses import replace

from alignment.config.options import AlignmentConfig
from alignment.data.messages import CUT_ALIKE
from alignment.data.report import NOT_DRAWN, DataReport
from alignment.data.truncation import NO_ROOM

# (desirable weight × rows) : (undesirable weight × rows), after https://arxiv.org/abs/2402.01306, section 4.2.
LEAST_RATIO, MOST_RATIO = 1.0, 4 / 3
LEAST_RATE, MOST_RATE = 5e-7, 5e-6
# The best rate of LoRA was ten times that of full fine-tuning over models and ranks in Schulman et al., "LoRA Without
# Regret" (2025), https://thinkingmachines.ai/blog/lora/.
ADAPTER_RATES = 10.0
LEAST_WINDOW = 16
MOST_LOST = 0.05  # of the rows: dropped, or with answers that are cut
_EDGE = 1e-9  # relative: 4/3 written as a decimal is inside


def about_rows(report: DataReport) -> list[str]:
    """Whether many rows are left out, or have answers that are cut and so never end."""
    found = []
    lost = {reason: count for reason, count in report.dropped.items() if reason != NOT_DRAWN}
    count = sum(lost.values())
    if count > MOST_LOST * report.rows_in:
        short = lost.keys() & {NO_ROOM, CUT_ALIKE}
        remedy = "raise max_length, or lower max_prompt_length" if short else "look at these rows"
        found.append(
            f"{count} of {report.rows_in} rows are dropped ({replace(report, dropped=lost).drops()}); {remedy}"
        )
    if report.completions_cut > MOST_LOST * report.rows_out:
        found.append(
            f"{report.completions_cut} of {report.rows_out} rows have answers that are cut: nothing is learned "
            "of how these end; raise max_length, or lower max_prompt_length"
        )
    return found


def about_labels(
    options: AlignmentConfig, report: DataReport, desirable_weight: float, undesirable_weight: float
) -> list[str]:
    """Whether desirable and undesirable rows, each with its weight in the loss, are in balance."""
    rows = {"desirable": report.desirable, "undesirable": report.undesirable}
    absent = [name for name, count in rows.items() if not count]
    if absent:
        there = "desirable" if absent == ["undesirable"] else "undesirable"
        return [
            f"all {report.rows_out} rows are {there}: nothing holds the policy back on the other side; set a "
            f"learning_rate below the usual one (it is {options.learning_rate:g})"
        ]
    good, bad = desirable_weight * report.desirable, undesirable_weight * report.undesirable
    if LEAST_RATIO * bad * (1 - _EDGE) <= good <= MOST_RATIO * bad * (1 + _EDGE):
        return []
    ratio = f"{good / bad:.3g}:1" if bad else "1:0"
    ways = []
    if undesirable_weight:
        ways.append(f"desirable_weight to {_range(bad / report.desirable)}")
    if desirable_weight:
        ways.append(f"undesirable_weight to {_range(good / MOST_RATIO / report.undesirable)}")
    return [
        f"desirable to undesirable rows ({report.desirable}:{report.undesirable}) are weighted {ratio}, outside "
        f"1:1 to 4:3; set {' or '.join(ways)}"
    ]


def _range(least: float) -> str:
    """From ``least`` to 4/3 of it in three digits, rounded inward so that every value shown is inside."""
    unit = 10.0 ** (math.floor(math.log10(least)) - 2)
    low, high = math.ceil(least / unit - _EDGE) * unit, math.floor(least * MOST_RATIO / unit + _EDGE) * unit
    return f"{low:.4g} to {high:.4g}"


def about_learning_rate(
    options: AlignmentConfig, beta: float, sooner: str = "", *, adapters: bool = False
) -> list[str]:
    """Whether the learning rate is one that fine-tuning on preferences works with.

    Args:
        options: the run's.
        beta: weight of the pull towards the reference.
        sooner: what makes training diverge at a lower rate already.
        adapters: whether they are trained, and not the whole model.
    """
    rate, scale = options.learning_rate, ADAPTER_RATES if adapters else 1.0
    least, most = LEAST_RATE * scale, MOST_RATE * scale
    if least * (1 - _EDGE) <= rate <= most * (1 + _EDGE):
        return []
    low = "it hardly moves the model; rather take more epochs"
    why = low if rate < least else f"training may diverge{sooner}"
    return [
        f"learning_rate={rate:g} at beta={beta:g} is outside {least:g} to {most:g}, the range for "
        f"{'adapters' if adapters else 'full fine-tuning'}: {why}; set one inside"
    ]


def about_window(options: AlignmentConfig, window_rows: int, why: str | None = None) -> list[str]:
    """Whether a step sees enough rows; ``why`` that matters, if for more than noise."""
    if window_rows >= LEAST_WINDOW:
        return []
    at_once = options.per_device_train_batch_size * options.world_size
    return [
        f"a step sees {window_rows} rows, fewer than {LEAST_WINDOW}: {why or 'gradients are noisy'}; set "
        f"gradient_accumulation_steps={math.ceil(LEAST_WINDOW / at_once)}"
    ]
