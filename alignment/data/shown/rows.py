"""Tokenized rows with the names in TRL's documentation, and batches of them, for scripts that inspect data.

Training does not use them: its batches are planned over the whole window and scored without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from alignment.data.kinds.base import TRUNCATED
from alignment.data.targets.tokenized import IGNORED
from alignment.data.windows import RowTable, WindowPlan

_BOOKKEEPING = ("row", "prompt_key", *TRUNCATED)
Columns = Mapping[str, list[Any]]


def as_stored(rows: Columns, bookkeeping: Sequence[str] = _BOOKKEEPING) -> dict[str, list[Any]]:
    """Return the columns with their stored names, such as ``prompt_ids`` and ``completion_ids``."""
    return {name: values for name, values in rows.items() if name not in bookkeeping}


def as_language_modeling(rows: Columns) -> dict[str, list[Any]]:
    """Join prompt and completion: ``input_ids``, ``completion_mask``, and ``labels`` that are -100 outside the mask.

    If all tokens of a row are in the loss, the first token also has a label, although it cannot be predicted.
    """
    ids, masks = [], []
    count = len(rows["prompt_ids"])
    scores, firsts = rows.get("scored", [None] * count), rows.get("first", [False] * count)
    pairs = zip(rows["prompt_ids"], rows["completion_ids"], strict=True)
    for (prompt, completion), scored, first in zip(pairs, scores, firsts, strict=True):
        ids.append([*prompt, *completion])
        kept = [True] * len(completion) if scored is None else scored
        masks.append([*[int(first)] * bool(prompt), *[0] * (len(prompt) - 1), *map(int, kept)])
    return {
        "input_ids": ids,
        "completion_mask": masks,
        "labels": [
            [token if kept else IGNORED for token, kept in zip(row, mask, strict=True)]
            for row, mask in zip(ids, masks, strict=True)
        ],
    }


def as_scored_pairs(rows: Columns) -> dict[str, list[Any]]:
    """Join each prompt with its completions: ``chosen_ids``, ``rejected_ids``, and ``margin`` (0 if unset)."""
    sides = {
        name: [[*prompt, *answer] for prompt, answer in zip(rows["prompt_ids"], rows[name], strict=True)]
        for name in ("chosen_ids", "rejected_ids")
    }
    return {**sides, "margin": list(rows["margin"])}


def as_labeled_pairs(rows: Columns) -> dict[str, list[Any]]:
    """Return ``_input_ids``, ``_attention_mask`` and ``_labels`` of prompts and of both completions with prompts."""
    shown = _masked("prompt", rows["prompt_ids"])
    for side in ("chosen", "rejected"):
        pairs = list(zip(rows["prompt_ids"], rows[f"{side}_ids"], strict=True))
        shown |= _masked(side, [[*prompt, *answer] for prompt, answer in pairs])
        shown[f"{side}_labels"] = [[IGNORED] * len(prompt) + [*answer] for prompt, answer in pairs]
    return shown


def _masked(side: str, ids: list[Any]) -> dict[str, list[Any]]:
    return {f"{side}_input_ids": ids, f"{side}_attention_mask": [[1] * len(each) for each in ids]}


class Collator:
    """Collates rows of ``trainer.train_dataset`` into tensors, padded on the right (prompts for generation: left).

    Args:
        pad_token_id: the padding value of ``input_ids``.

    The result has ``input_ids`` and ``attention_mask`` (B, T) int64. Pairs form one batch, the chosen completions
    first. ``completion_mask`` (B, T) is 1 for completion tokens, ``labels`` (B, T) is -100 for other tokens. KTO rows
    with ``KL_completion_ids`` also give ``KL_input_ids`` and its masks. Numbers and booleans become (B,) tensors.
    Packs with ``seq_lengths`` get ``position_ids`` (B, T), which restart at 0 for each sequence, where the label is
    -100.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        there = set(features[0]) if features else set()
        found: dict[str, Any] = {}
        for prefix, answers in (("", _answers(there)), ("KL_", ("KL_completion_ids",))):
            if "prompt_ids" in there and answers and set(answers) <= there:
                split = [(row["prompt_ids"], row[name]) for name in answers for row in features]
                found |= self._sequences(split, prefix)
                there -= set(answers)
        if found:
            there -= {"prompt_ids"}
        elif "prompt_ids" in there:
            found |= self._padded("prompt", [row["prompt_ids"] for row in features], left=True)
            there -= {"prompt_ids"}
        elif {"chosen_ids", "rejected_ids"} <= there:
            names = ("chosen_ids", "rejected_ids")
            found |= self._padded("", [row[name] for name in names for row in features])
            there -= set(names)
        elif "input_ids" in there:
            found |= self._padded("", [row["input_ids"] for row in features])
            there -= {"input_ids"}
        found |= {name: self._column(name, [row[name] for row in features]) for name in sorted(there)}
        if "seq_lengths" in there:
            places = [[place for length in row["seq_lengths"] for place in range(length)] for row in features]
            found["position_ids"] = _pad(places, 0)
            found["labels"][found["position_ids"] == 0] = IGNORED
        return found

    def _sequences(self, split: Sequence[tuple[Sequence[int], Sequence[int]]], prefix: str) -> dict[str, Tensor]:
        made = self._padded("", [[*prompt, *answer] for prompt, answer in split])
        made["completion_mask"] = _pad([[0] * len(p) + [1] * len(a) for p, a in split], 0)
        return {f"{prefix}{name}": value for name, value in made.items()}

    def _padded(self, side: str, ids: list[Any], *, left: bool = False) -> dict[str, Tensor]:
        name = f"{side}_" if side else ""
        return {
            f"{name}input_ids": _pad(ids, self.pad_token_id, left=left),
            f"{name}attention_mask": _pad([[1] * len(each) for each in ids], 0, left=left),
        }

    def _column(self, name: str, values: list[Any]) -> Any:
        if name.endswith("labels"):
            return _pad(values, IGNORED)
        if name.endswith("_input_ids"):
            return _pad(values, self.pad_token_id)
        if name.endswith("_mask"):
            return _pad(values, 0)
        plain = all(isinstance(value, (bool, int, float)) for value in values)
        return torch.tensor(values) if plain and values else values


def _answers(there: set[str]) -> tuple[str, ...]:
    pair = ("chosen_ids", "rejected_ids")
    return pair if set(pair) <= there else ("completion_ids",)


def _pad(rows: Sequence[Sequence[int]], fill: int, *, left: bool = False) -> Tensor:
    """Pad rows of different lengths to a (B, T) int64 tensor."""
    width = max(map(len, rows), default=0)
    padded = torch.full((len(rows), width), fill, dtype=torch.long)
    for number, row in enumerate(rows):
        padded[number, slice(width - len(row), None) if left else slice(len(row))] = torch.tensor(row).long()
    return padded


class PlannedBatches:
    """This rank's batches of a sequence of windows, collated by :class:`Collator`.

    Args:
        rows: returns the rows; called when the first batch is collated.
        plans: yields the windows in order.
        rank: this rank.
        collator: collates the batches.
        table: lengths of the rows.
        batch_size: maximum number of rows of a batch.
    """

    def __init__(
        self,
        rows: Callable[[], Dataset],
        plans: Callable[[], Iterator[WindowPlan]],
        rank: int,
        collator: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]],
        table: RowTable,
        batch_size: int,
    ) -> None:
        self._rows, self._plans, self._rank, self._table = rows, plans, rank, table
        self.collate_fn, self.batch_size = collator, batch_size

    @property
    def dataset(self) -> Dataset:
        """The rows."""
        return self._rows()

    def __len__(self) -> int:
        return sum(len(plan.micro_batches) for plan in self._plans())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = self.dataset
        for plan in self._plans():
            for micro in plan.micro_batches:
                own = micro[self._rank]
                features = [rows[row] for row in own.rows]
                for feature, row, partner in zip(features, own.rows, own.partners, strict=True):
                    if partner >= 0:
                        kept = self._table.mismatched_completion(np.array([row]), np.array([partner]))[0]
                        feature["KL_completion_ids"] = rows[partner]["completion_ids"][:kept]
                # A row without a partner has no mismatched completion; those of the other rows are then omitted too.
                if not all("KL_completion_ids" in feature for feature in features):
                    features = [{n: v for n, v in one.items() if n != "KL_completion_ids"} for one in features]
                yield self.collate_fn(features)
