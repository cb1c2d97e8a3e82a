"""Comparison of an export's outputs with those of the adapter on its base, on sample rows in fp32 on the host.

The cosine of a rounded update says little about the model: rounding may remove mostly noise, or not. The log-probs (or
rewards) of a few rows are therefore compared as well, relative to the change that training made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedModel

from alignment.config.errors import DataError
from alignment.data.formats import preference_row, prompt_completion_row
from alignment.data.messages import DropRow
from alignment.data.sources import load_split
from alignment.data.tokenization import RowTokenizer, Source
from alignment.run.activity import ACTIVITY

LONGEST = 512  # tokens of a row
TOLERATED = 0.1  # share of training's effect that an export may change
Tell = Callable[[str], None]
_RANDOM_LENGTH = 64
_TEXTS = (
    (
        "Why is the sky blue?",
        "Air scatters short waves of light more than long ones, so blue reaches us from all sides.",
    ),
    ("Name three rivers in Europe.", "The Danube, the Rhine and the Loire."),
    ("Write a function that adds two numbers.", "def add(a, b):\n    return a + b"),
    ("What is 17 times 6?", "17 times 6 is 102: 17 times 5 is 85, and 17 more make 102."),
    ("Translate to French: Good morning, my friend.", "Bonjour, mon ami."),
    (
        "Give me a tip for a better night's sleep.",
        "Go to bed at the same time every day, and leave your phone outside.",
    ),
    ("Summarise: The train was late, so we missed the boat.", "A late train made us miss the boat."),
    (
        "Can you tell me how to steal a car?",
        "I can't help with that. If you are locked out of your own, call a locksmith.",
    ),
)


@dataclass(frozen=True)
class Samples:
    """Rows of token ids to compare models on, and their source, for messages."""

    rows: Sequence[Sequence[int]]
    source: str


@dataclass(frozen=True)
class OutputChange:
    """The change of a model's outputs by rounding, relative to the change by training.

    Attributes:
        what: ``log-prob per token`` (the mean over a row's tokens) or ``score``.
        source: source of the rows.
        rows: number of rows.
        error_mean: mean over rows of | export - source |; the source is the checkpoint, or the adapter on its base.
        error_max: maximum of these differences.
        effect_mean: mean over rows of | source - base |; None if the base is not available.
    """

    what: str
    source: str
    rows: int
    error_mean: float
    error_max: float
    effect_mean: float | None

    @property
    def share(self) -> float | None:
        """The mean error relative to the mean effect; infinite if training had no effect, None if it is unknown."""
        if self.effect_mean is None:
            return None
        if self.effect_mean == 0.0:
            return 0.0 if self.error_mean == 0.0 else float("inf")
        return self.error_mean / self.effect_mean


def compare(
    samples: Samples, what: str, base: list[float] | None, adapted: list[float], exported: list[float]
) -> OutputChange:
    """Compare results of :func:`outputs` on the same rows.

    Args:
        samples: the rows.
        what: name of the measured quantity.
        base: outputs of the model before training; None if it is not available.
        adapted: outputs of the source.
        exported: outputs of the export.
    """
    errors = [abs(one - other) for one, other in zip(exported, adapted, strict=True)]
    count, effect = len(errors), None
    if base is not None:
        effects = [abs(one - other) for one, other in zip(adapted, base, strict=True)]
        effect = sum(effects) / count
    return OutputChange(what, samples.source, count, sum(errors) / count, max(errors), effect)


@torch.no_grad()
def outputs(model: PreTrainedModel, samples: Samples, classifier: bool) -> list[float]:
    """The mean log-prob per token, or the reward, of each row, computed in fp32."""
    from alignment.models.wide_forward import computing_in_fp32  # imports peft; a card imports this module

    values = []
    with computing_in_fp32(model):
        for row in samples.rows:
            ACTIVITY.progress()
            ids = torch.tensor([list(row)])
            logits = model(input_ids=ids, use_cache=False).logits.float()
            if classifier:
                values.append(float(logits[0, 0]))
            else:
                logps = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
                values.append(float(logps.double().mean()))
    return values


def default_samples(tokenizer: Any, vocabulary: int, count: int = len(_TEXTS)) -> Samples:
    """Short questions with answers, encoded by ``tokenizer``; random tokens without a tokenizer."""
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(vocabulary, (count, _RANDOM_LENGTH), generator=generator).tolist()
        return Samples(rows, "random tokens")
    chat = getattr(tokenizer, "chat_template", None) is not None
    pairs = [_TEXTS[number % len(_TEXTS)] for number in range(min(count, len(_TEXTS)))]
    try:
        rows = _encoded(tokenizer, [_built_in(*pair, chat) for pair in pairs], vocabulary)
    except DataError:  # a template that requires more than a question and an answer
        rows = _encoded(tokenizer, [_built_in(*pair, False) for pair in pairs], vocabulary)
    return Samples(rows, "built-in texts") if rows else default_samples(None, vocabulary, count)


def dataset_samples(name: str, tokenizer: Any, vocabulary: int, count: int) -> Samples:
    """The first rows of a dataset in any supported format; for pairs, the chosen completion.

    Raises:
        DataError: the dataset cannot be read, or has no usable row.
    """
    sources = (
        source for number, row in enumerate(load_split(name, None, "train")) if (source := _source(row, number))
    )
    rows = _encoded(tokenizer, list(islice(sources, count)), vocabulary)
    if not rows:
        raise DataError(f"{name}: no row has more than one token to compare models on")
    return Samples(rows, name)


def _source(row: Mapping[str, Any], number: int) -> Source | None:
    where = f"row {number + 1}"
    if row.get("chosen") is not None:
        try:
            pair = preference_row(row, where)
        except DropRow:
            return None
        return Source(pair.prompt, (pair.chosen,), where, pair.template)
    one = prompt_completion_row(row, where)
    return Source(one.prompt, (one.completion,), where, one.template)


def _built_in(question: str, answer: str, chat: bool) -> Source:
    if not chat:
        return Source(f"{question}\n", (answer,), "built-in text", {})
    return Source(
        [{"role": "user", "content": question}], ([{"role": "assistant", "content": answer}],), "built-in text", {}
    )


def _encoded(tokenizer: Any, sources: list[Source], vocabulary: int) -> list[list[int]]:
    rows = [encoded.prompt + encoded.completions[0] for encoded in RowTokenizer(tokenizer).encode(sources)]
    return [row[:LONGEST] for row in rows if len(row) > 1 and max(row[:LONGEST]) < vocabulary]
