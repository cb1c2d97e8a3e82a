"""Labeled completions, for KTO. A pair is also accepted, and becomes two rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from datasets import Dataset, Value
from torch import Tensor

from alignment.config.errors import DataError, show
from alignment.data.batching import Batch, OnDevice, collate
from alignment.data.kinds.base import Kind, Record
from alignment.data.kinds.pairs import PAIRS
from alignment.data.messages import Row, Source, answered, conversation
from alignment.data.targets.tokenized import TokenColumns, TokenFormat
from alignment.data.tokenization import Encoded, Limits, RowTokenizer
from alignment.data.windows import RowTable, WindowPlan


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
            return replace(PAIRS.parse(row, where, others), further={"labels": [True, False]})
        labels = {"labels": [label_of(row, where)]}
        spoken = row.get("completion") is None and row.get("messages") is not None
        return replace(conversation(row, "messages", where) if spoken else answered(row, where), further=labels)

    def read_tokens(self, row: Row, columns: TokenColumns, where: str, tokenizer: RowTokenizer) -> Encoded:
        return replace(super().read_tokens(row, columns, where, tokenizer), further={"labels": [label_of(row, where)]})

    def records(self, row: Encoded, limits: Limits, tokenizer: RowTokenizer) -> list[Record]:
        """Return one record per label, each truncated by itself."""
        records = super().records(row, limits, tokenizer)
        # Equal for equal prompts, however they are truncated, in every process and on every machine.
        digest = hashlib.blake2b(np.asarray(row.prompt, dtype="<i4").tobytes(), digest_size=8).digest()
        key = int.from_bytes(digest, "little", signed=True)
        labels = row.further["labels"]
        return [{**record, "label": label, "prompt_key": key} for record, label in zip(records, labels)]

    def collate(self, dataset: Dataset, table: RowTable, plan: WindowPlan, micro: int, rank: int) -> UnpairedBatch:
        own = plan.micro_batches[micro][rank]
        data = dataset[list(own.rows)]
        matched = list(zip(data["prompt_ids"], data["completion_ids"]))
        paired = [i for i, partner in enumerate(own.partners) if partner >= 0]
        others = dataset[[own.partners[i] for i in paired]]["completion_ids"] if paired else []
        kept = table.mismatched_completion(np.array(own.rows, dtype=np.int64), np.array(own.partners, dtype=np.int64))
        mismatched = [(matched[i][0], other[: kept[i]]) for i, other in zip(paired, others)]
        longest, longest_mismatched = plan.longest[micro], plan.longest_mismatched[micro]
        return UnpairedBatch(
            rows=own.rows,
            partners=own.partners,
            labels=torch.tensor(data["label"], dtype=torch.bool),
            matched=collate(matched, longest),
            mismatched=collate(mismatched, longest_mismatched),
            joint=collate(matched + mismatched, longest + longest_mismatched),
        )


UNPAIRED = Unpaired()


def label_of(row: Row, where: str) -> bool:
    """Return whether the row's completion is desirable; DataError if its label is neither true nor false."""
    if type(label := row["label"]) is not bool:
        raise DataError(f"{where}: label is {show(label)}; expected true or false")
    return label
