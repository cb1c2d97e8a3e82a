"""Labeled completions, for KTO. A pair is also accepted, and becomes two rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from datasets import Dataset, Value
from torch import Tensor

from alignment.config.errors import DataError, LabelError, show
from alignment.data.batching import Batch, collate
from alignment.data.kinds.base import Kind
from alignment.data.kinds.pairs import PAIRS
from alignment.data.messages import Row, Source, conversation, prompt_of, source_of, text_of
from alignment.data.targets import TokenColumns, TokenFormat
from alignment.data.tokenization import Encoded, RowTokenizer
from alignment.data.transfer import OnDevice
from alignment.data.windows import WindowPlan


@dataclass(frozen=True)
class UnpairedBatch(OnDevice):
    """Completions with a label.

    Attributes:
        rows: row IDs.
        partners: (R,) IDs of the rows whose completions are used in the mismatched sequences; -1: none.
        labels: (R,) bool.
        matched: R sequences, each prompt with its own completion.
        mismatched: K <= R sequences, each prompt that has a partner with the partner's completion.
        joint: the R + K sequences of both, for a single pass without gradients.
    """

    rows: tuple[int, ...]
    partners: tuple[int, ...]
    labels: Tensor
    matched: Batch
    mismatched: Batch
    joint: Batch


class Unpaired(Kind):
    """A completion and whether it is desirable."""

    name = "unpaired_preference"
    formats = (("prompt", "completion", "label"), ("messages", "label"), ("chosen", "rejected"))
    completions = ("completion_ids",)
    divides = True
    further = {"label": Value("bool"), "prompt_key": Value("int64")}
    tokens = TokenFormat(("prompt_ids", "completion_ids"), ("label",), required=("label",))

    def parse(self, row: Row, where: str, others: Row) -> Source:
        """Convert a row to one completion with its label, or to both completions of a pair, True and False."""
        there = [row.get(key) is not None for key in ("chosen", "rejected")]
        labeled = row.get("completion") is not None and row.get("label") is not None
        if labeled and all(there):
            raise DataError(
                f"{where}: both completion, label and chosen, rejected are set; keep one of the two formats"
            )
        if not labeled and (any(there) or "label" not in row):
            return replace(PAIRS.parse(row, where, others), further={"label": [True, False]})
        label = _label(row, where)
        if row.get("completion") is None and row.get("messages") is not None:
            return replace(conversation(row, "messages", where), further=label)
        completion = text_of({"completion": None, **row}, "completion", where, answer=True)
        return replace(source_of(row, where, prompt_of(row, where), completion=completion), further=label)

    def read_tokens(self, row: Row, columns: TokenColumns, where: str, tokenizer: RowTokenizer) -> Encoded:
        return replace(super().read_tokens(row, columns, where, tokenizer), further=_label(row, where))

    def collate(self, dataset: Dataset, plan: WindowPlan, micro: int, rank: int) -> UnpairedBatch:
        own = plan.micro_batches[micro][rank]
        data = dataset[list(own.rows)]
        matched = list(zip(data["prompt_ids"], data["completion_ids"]))
        paired = [i for i, partner in enumerate(own.partners) if partner >= 0]
        others = dataset[[own.partners[i] for i in paired]]["completion_ids"] if paired else []
        mismatched = [(matched[i][0], other[: own.mismatched[i]]) for i, other in zip(paired, others)]
        longest, longest_mismatched = plan.longest[micro], plan.longest_mismatched[micro]
        return UnpairedBatch(
            rows=own.rows,
            partners=own.partners,
            labels=torch.tensor(data["label"], dtype=torch.bool),
            matched=collate(matched, longest),
            mismatched=collate(mismatched, longest_mismatched),
            joint=collate(
                matched + mismatched,
                longest + longest_mismatched,
                groups=[(i, len(matched) + number) for number, i in enumerate(paired)],
            ),
        )


UNPAIRED = Unpaired()


def _label(row: Row, where: str) -> dict[str, list[bool]]:
    if type(row["label"]) is not bool:
        raise LabelError(f"{where}: label is {show(row['label'])}; expected true or false")
    return {"label": [row["label"]]}
