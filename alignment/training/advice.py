"""Advice on settings that are valid but known to work poorly; each method chooses which checks apply."""

from __future__ import annotations

import contextlib
import math
import reprlib
from dataclasses import replace
from typing import Any

from alignment.config.options import AlignmentConfig
from alignment.data.messages import Row, as_turns
from alignment.data.report import NOT_DRAWN, DataReport
from alignment.data.tokenization import CUT_ALIKE, NO_ROOM

# (desirable weight × rows) : (undesirable weight × rows), from https://arxiv.org/abs/2402.01306, section 4.2.
LEAST_RATIO, MOST_RATIO = 1.0, 4 / 3
LEAST_RATE, MOST_RATE = 5e-7, 5e-6
# LoRA's best learning rate was ten times that of full fine-tuning across models and ranks in Schulman et al., "LoRA
# Without Regret" (2025), https://thinkingmachines.ai/blog/lora/.
ADAPTER_RATES = 10.0
LEAST_WINDOW = 16
MOST_LOST = 0.05  # share of rows that are dropped, or of truncated prompts or completions
_SHORT = reprlib.Repr()  # of rows
_SHORT.maxstring = 120
_EDGE = 1e-9  # relative tolerance, so that 4/3 as a decimal is accepted


def about_rows(report: DataReport, completions: int = 1) -> list[str]:
    """Warn if many rows are dropped, or many prompts or completions (``completions`` per row) are truncated."""
    found = []
    lost = {reason: count for reason, count in report.dropped.items() if reason != NOT_DRAWN}
    if sum(lost.values()) > MOST_LOST * report.rows_in:
        short = lost.keys() & {NO_ROOM, CUT_ALIKE}
        remedy = "raise max_length, or lower max_prompt_length" if short else "check these rows"
        drops = replace(report, dropped=lost).drops()
        found.append(f"{sum(lost.values())} of {report.rows_in} rows were dropped ({drops}); {remedy}")
    answers = completions * report.rows_out
    for what, cut, total, effect in (
        ("prompts", report.prompts_cut, report.rows_out, "completions are learned without part of their prompt"),
        ("completions", report.completions_cut, answers, "the model does not learn how they end"),
    ):
        if cut > MOST_LOST * total:
            remedy = "raise max_length, or change max_prompt_length"
            found.append(f"{cut} of {total} {what} are truncated, so {effect}; {remedy}")
    return found


def about_strings(row: Row, tokenizer: Any) -> list[str]:
    """Advise the chat template, if the tokenizer has one and ``row``, the first one, is strings without its tokens."""
    texts = [row[name] for name in ("prompt", "completion", "chosen") if row.get(name) is not None]
    marks = [token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
    plain = all(isinstance(text, str) and not any(mark in text for mark in marks) for text in texts)
    with contextlib.suppress(Exception):  # a template is user code, and a row without a prompt cannot use it
        turns = as_turns(row, "")
        messages = [*turns["prompt"], *turns.get("completion", turns.get("chosen", ()))]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=len(texts) == 1)
        said = (
            f"the rows are strings, which are tokenized without the chat template, such as "
            f"{_SHORT.repr(''.join(texts))}; if the model is a chat model, set apply_chat_template: true for "
            f"{_SHORT.repr(rendered)}"
        )
        return [said] if tokenizer.chat_template and plain else []
    return []


def about_labels(
    options: AlignmentConfig, report: DataReport, desirable_weight: float, undesirable_weight: float
) -> list[str]:
    """Warn if desirable and undesirable rows, weighted as in the loss, are imbalanced."""
    if not (report.desirable and report.undesirable):
        return [
            f"all {report.rows_out} rows are {'desirable' if report.desirable else 'undesirable'}, so no opposite "
            f"examples limit the policy; set learning_rate below the usual value (it is {options.learning_rate:g})"
        ]
    good, bad = desirable_weight * report.desirable, undesirable_weight * report.undesirable
    if LEAST_RATIO * bad * (1 - _EDGE) <= good <= MOST_RATIO * bad * (1 + _EDGE):
        return []
    ways = []
    if undesirable_weight:
        ways.append(f"desirable_weight to {_range(bad / report.desirable)}")
    if desirable_weight:
        ways.append(f"undesirable_weight to {_range(good / MOST_RATIO / report.undesirable)}")
    return [
        f"the weighted ratio of desirable to undesirable rows ({report.desirable}:{report.undesirable}) is "
        f"{f'{good / bad:.3g}:1' if bad else '1:0'}, outside 1:1 to 4:3; set {' or '.join(ways)}"
    ]


def _range(least: float) -> str:
    """Format ``least`` to 4/3 of it to three digits, rounded inward so that every value shown is in range."""
    unit = 10.0 ** (math.floor(math.log10(least)) - 2)
    low, high = math.ceil(least / unit - _EDGE) * unit, math.floor(least * MOST_RATIO / unit + _EDGE) * unit
    return f"{low:.4g} to {high:.4g}"


def about_learning_rate(
    options: AlignmentConfig, beta: float, sooner: str = "", *, adapters: bool = False
) -> list[str]:
    """Warn if the learning rate is unusual; ``sooner`` says why training may diverge at a lower one than usual."""
    rate, scale = options.learning_rate, ADAPTER_RATES if adapters else 1.0
    least, most = LEAST_RATE * scale, MOST_RATE * scale
    if least * (1 - _EDGE) <= rate <= most * (1 + _EDGE):
        return []
    low = "the model may barely change; set a value in this range"
    high = f"training may diverge{sooner}; set a value in this range, unless the model is tiny or untrained"
    return [
        f"learning_rate={rate:g} at beta={beta:g} is outside {least:g} to {most:g}, the usual range for "
        f"{'adapters' if adapters else 'full fine-tuning'}: {low if rate < least else high}"
    ]


def about_window(options: AlignmentConfig, window_rows: int, why: str | None = None) -> list[str]:
    """Warn if a step has too few rows; ``why`` replaces the default reason, gradient noise."""
    if window_rows >= LEAST_WINDOW:
        return []
    at_once = options.per_device_train_batch_size * options.world_size
    return [
        f"a step uses {window_rows} rows, fewer than {LEAST_WINDOW}: {why or 'gradients are noisy'}; set "
        f"gradient_accumulation_steps={math.ceil(LEAST_WINDOW / at_once)}"
    ]
