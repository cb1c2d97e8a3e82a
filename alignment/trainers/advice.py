"""Advice about a run that can go on as it is: what experience with KTO and CPO says about its options and its data.

Pure: options and counts in, sentences out. What is *wrong* is refused where the options are checked.
"""

from __future__ import annotations

import math

from alignment.config.kto import KTOConfig
from alignment.config.options import AlignmentConfig
from alignment.data.report import DataReport

# (desirable weight × rows) : (undesirable weight × rows), after https://arxiv.org/abs/2402.01306, section 4.2.
LEAST_RATIO, MOST_RATIO = 1.0, 4 / 3
LEAST_RATE, MOST_RATE = 5e-7, 5e-6
LEAST_WINDOW = 16
_PREFERENCE = ("kto", "cpo")
_EDGE = 1e-9  # relative: 4/3 written as a decimal is inside


def advice(options: AlignmentConfig, report: DataReport, window_rows: int) -> list[str]:
    """Sentences for the user, each with what to set; none where there is nothing to say.

    Args:
        options: the run's.
        report: of the rows to train on.
        window_rows: rows of one optimizer step, over all ranks.
    """
    if options.method not in _PREFERENCE:
        return []
    said = _about_labels(options, report) if isinstance(options, KTOConfig) else []
    return said + _about_learning_rate(options) + _about_window(options, window_rows)


def _about_labels(options: KTOConfig, report: DataReport) -> list[str]:
    rows = {"desirable": report.desirable, "undesirable": report.undesirable}
    absent = [name for name, count in rows.items() if not count]
    if absent:
        there = "desirable" if absent == ["undesirable"] else "undesirable"
        return [
            f"all {report.rows_out} rows are {there}: nothing holds the policy back on the other side; set a "
            f"learning_rate below the usual one (it is {options.learning_rate:g})"
        ]
    good = options.desirable_weight * report.desirable
    bad = options.undesirable_weight * report.undesirable
    if LEAST_RATIO * bad * (1 - _EDGE) <= good <= MOST_RATIO * bad * (1 + _EDGE):
        return []
    ratio = f"{good / bad:.3g}:1" if bad else "1:0"
    ways = []
    if options.undesirable_weight:
        ways.append(f"desirable_weight to {_range(bad / report.desirable)}")
    if options.desirable_weight:
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


def _about_learning_rate(options: AlignmentConfig) -> list[str]:
    rate = options.learning_rate
    if LEAST_RATE * (1 - _EDGE) <= rate <= MOST_RATE * (1 + _EDGE):
        return []
    why = "it hardly moves the model; rather take more epochs" if rate < LEAST_RATE else "training may diverge"
    if rate > MOST_RATE and isinstance(options, KTOConfig):
        why += ", at a smaller beta sooner"
    return [
        f"learning_rate={rate:g} at beta={options.beta:g} is outside {LEAST_RATE:g} to {MOST_RATE:g}, the range for "  # type: ignore[attr-defined]
        f"full fine-tuning: {why}; set one inside"
    ]


def _about_window(options: AlignmentConfig, window_rows: int) -> list[str]:
    if window_rows >= LEAST_WINDOW:
        return []
    at_once = options.per_device_train_batch_size * options.world_size
    why = "gradients are noisy"
    if isinstance(options, KTOConfig) and options.loss_type == "kto":
        why = "KTO's KL is estimated from these rows alone"
    return [
        f"a step sees {window_rows} rows, fewer than {LEAST_WINDOW}: {why}; set gradient_accumulation_steps="
        f"{math.ceil(LEAST_WINDOW / at_once)}"
    ]
