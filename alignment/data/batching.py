"""Collate planned rows into tensors.

A batch is a set of *sequences*, each a prompt and a completion; only completion tokens are scored. Callers work with
sequences, never with rows of a matrix, so that several sequences could share a row of ``input_ids``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from alignment.data.packing.rows import PackedRows
from alignment.data.transfer import transferred
from alignment.data.windows import MicroBatch, RowTable, WindowPlan, WindowSampler

# Cost of an additional pass through the model, in padded tokens.
_BLOCK_COST = 256
TokenIds = Sequence[int]
Self = TypeVar("Self", bound="OnDevice")


class AnyBatch(Protocol):
    """The interface of all batches: the IDs of their rows."""

    @property
    def rows(self) -> tuple[int, ...]: ...


BatchT = TypeVar("BatchT", bound=AnyBatch)


@dataclass(frozen=True)
class OnDevice:
    """Base class of batches whose tensors move to a device together, in one asynchronous copy."""

    def to(self: Self, device: torch.device, leave: Collection[str] = ()) -> Self:
        """Return the batch with all tensors on ``device``, except those in the fields named in ``leave``."""
        return self._with(iter(transferred(self._tensors(leave), device)), leave)

    def _tensors(self, leave: Collection[str]) -> list[Tensor]:
        """Return the tensors of this batch and of nested batches, in the order of the fields."""
        found: list[Tensor] = []
        for value in self._moving(leave).values():
            found += [value] if isinstance(value, Tensor) else value._tensors(leave)
        return found

    def _with(self: Self, tensors: Iterator[Tensor], leave: Collection[str]) -> Self:
        """Return the batch with its tensors replaced, in the order of :meth:`_tensors`."""
        values = self._moving(leave).items()
        return replace(
            self, **{n: next(tensors) if isinstance(v, Tensor) else v._with(tensors, leave) for n, v in values}
        )

    def _moving(self, leave: Collection[str]) -> dict[str, Tensor | OnDevice]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in leave}
        return {name: value for name, value in values.items() if isinstance(value, (Tensor, OnDevice))}


@dataclass(frozen=True)
class Batch(OnDevice):
    """Sequences for one forward pass.

    Attributes:
        input_ids: (B, T) int64, padded on the right.
        attention_mask: (B, T) int64, 1 for tokens and 0 for padding.
        positions: (N,) int64 indices into the flattened (B*T) positions: the position before each scored token.
        targets: (N,) int64, the scored completion tokens.
        segments: (N,) int64, the sequence to which each scored token belongs.
        lengths: (S,) int64, the number of scored tokens of each sequence.
        longest: largest N on any rank in this forward pass.
        blocks: ``(rows, width)`` of groups of consecutive rows of ``input_ids``; everything beyond the width is
            padding.
    """

    input_ids: Tensor
    attention_mask: Tensor
    positions: Tensor
    targets: Tensor
    segments: Tensor
    lengths: Tensor
    longest: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        """The number of tokens without padding, including prompts."""
        return int(self.attention_mask.sum()) if len(self.lengths) else 0


def collate(
    sequences: Sequence[tuple[TokenIds, TokenIds]], longest: int, scored: Sequence[Sequence[bool] | None] | None = None
) -> Batch:
    """Pad (prompt, completion) pairs on the right. An empty batch gets one dummy token, which is not scored.

    The fill value is 0. It is neither scored nor attended to by scored tokens, so no pad token is needed. Rows are in
    the order of the sequences, or sorted by descending length and cut into blocks if that saves padding. ``scored``
    contains a mask of the scored completion tokens for each sequence; None means all of them.
    """
    count = max(1, len(sequences))
    totals = [len(p) + len(c) for p, c in sequences] or [1]
    width, rows = max(totals), list(range(count))
    falling = sorted(rows, key=lambda row: -totals[row])
    blocks = cut_into_blocks([totals[row] for row in falling])
    if blocks[1:]:
        for row, sequence in enumerate(falling):
            rows[sequence] = row
    input_ids = torch.zeros((count, width), dtype=torch.long)
    attention_mask = torch.zeros((count, width), dtype=torch.long)
    attention_mask[0, 0] = 1
    positions, targets = [], []
    for row, total, (prompt, completion), mask in zip(rows, totals, sequences, scored or [None] * count):
        input_ids[row, :total] = torch.tensor([*prompt, *completion])
        attention_mask[row, :total] = 1
        positions.append(torch.arange(len(prompt) - 1, total - 1) + row * width)
        targets.append(input_ids[row, len(prompt) : total])
        if mask is not None:
            kept = torch.tensor(mask, dtype=torch.bool)
            positions[-1], targets[-1] = positions[-1][kept], targets[-1][kept]
    empty = torch.zeros(0, dtype=torch.long)
    lengths = torch.tensor([len(each) for each in targets], dtype=torch.long)
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        positions=torch.cat(positions) if positions else empty,
        targets=torch.cat(targets) if targets else empty,
        segments=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        lengths=lengths,
        longest=longest,
        blocks=blocks,
    )


def ends(batch: Batch, longest: int | None = None) -> Batch:
    """Return the same sequences with their last tokens only, from which a reward model computes its score.

    Unlike in other batches, a position is that of the token itself, not the one before it. There is one per sequence.

    Args:
        batch: S sequences with at least one completion token each; S may be 0.
        longest: largest S on any rank in this forward pass; None for the batch's own S.
    """
    # On a GPU, the host would wait for the answer.
    assert batch.lengths.is_cuda or bool(batch.lengths.all()), "a sequence without completion tokens has no known end"
    count, last = len(batch.lengths), batch.lengths.cumsum(0) - 1
    return replace(
        batch,
        positions=batch.positions[last] + 1,
        targets=batch.targets[last],
        segments=torch.arange(count, device=batch.segments.device),
        lengths=torch.ones_like(batch.lengths),
        longest=count if longest is None else longest,
    )


def cut_into_blocks(widths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Cut rows of descending width into blocks ``(rows, width)`` that minimize padding plus a fixed cost per block."""
    count, width = len(widths), np.asarray(widths, dtype=np.int64)
    least = np.zeros(count + 1, dtype=np.int64)  # [n]: minimal cost of the first n rows
    begins = np.zeros(count + 1, dtype=np.int64)  # [n]: start of the last of their blocks
    for stop in range(1, count + 1):
        costs = least[:stop] + np.arange(stop, 0, -1) * width[:stop] + _BLOCK_COST
        begins[stop] = costs.argmin()
        least[stop] = costs[begins[stop]]
    blocks, stop = [], count
    while stop:
        start = int(begins[stop])
        blocks.append((stop - start, int(width[start])))
        stop = start
    return tuple(reversed(blocks))


@dataclass(frozen=True)
class UnpairedBatch(OnDevice):
    """Completions with a label, for KTO.

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


@dataclass(frozen=True)
class PreferenceBatch(OnDevice):
    """Pairs: ``pairs`` has 2P sequences, the chosen completions first; ``margins`` is (P,) fp32 or None."""

    rows: tuple[int, ...]
    pairs: Batch
    margins: Tensor | None = None


@dataclass(frozen=True)
class CompletionBatch(OnDevice):
    """Completions for SFT: ``completions`` has one sequence per entry of ``rows``, in which a pack may be repeated."""

    rows: tuple[int, ...]
    completions: Batch


@dataclass(frozen=True)
class PromptBatch(OnDevice):
    """Prompts for which completions are generated, as token IDs. There is nothing to score yet, so no tensors."""

    rows: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]


# Collates one rank's micro-batch: (dataset, table, plan, index of the micro-batch, rank). The dataset is PackedRows if
# packing is used.
Collate = Callable[[Any, RowTable, WindowPlan, int, int], AnyBatch]


def collate_unpaired(dataset: Dataset, table: RowTable, plan: WindowPlan, micro: int, rank: int) -> UnpairedBatch:
    """Collate one rank's micro-batch of labeled completions."""
    own: MicroBatch = plan.micro_batches[micro][rank]
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


def collate_preference(dataset: Dataset, table: RowTable, plan: WindowPlan, micro: int, rank: int) -> PreferenceBatch:
    """Collate one rank's micro-batch of (chosen, rejected) pairs."""
    own = plan.micro_batches[micro][rank]
    return _pairs_of(own, dataset[list(own.rows)], plan.longest[micro])


def collate_preference_margin(
    dataset: Dataset, table: RowTable, plan: WindowPlan, micro: int, rank: int
) -> PreferenceBatch:
    """Collate one rank's micro-batch of (chosen, rejected, margin)."""
    own = plan.micro_batches[micro][rank]
    data = dataset[list(own.rows)]
    margins = torch.tensor(data["margin"], dtype=torch.float32)
    return replace(_pairs_of(own, data, plan.longest[micro]), margins=margins)


def collate_preference_ids(
    rows: tuple[int, ...], pairs: Sequence[tuple[TokenIds, TokenIds, TokenIds]], longest: int
) -> PreferenceBatch:
    """Collate pairs of token IDs.

    Args:
        rows: (P,) row IDs, for messages.
        pairs: P tuples of prompt, first and second completion; P may be 0.
        longest: largest number of completion tokens on any rank in this forward pass.
    """
    firsts = [(prompt, first) for prompt, first, _ in pairs]
    seconds = [(prompt, second) for prompt, _, second in pairs]
    return PreferenceBatch(rows, collate(firsts + seconds, longest))


def _pairs_of(own: MicroBatch, data: Mapping[str, Any], longest: int) -> PreferenceBatch:
    return collate_preference_ids(
        own.rows, list(zip(data["prompt_ids"], data["chosen_ids"], data["rejected_ids"])), longest
    )


def collate_completion(
    dataset: Dataset | PackedRows, table: RowTable, plan: WindowPlan, micro: int, rank: int
) -> CompletionBatch:
    """Collate one rank's micro-batch of completions for SFT. Sequences of packs are handled like those of rows."""
    own = plan.micro_batches[micro][rank]
    data = dataset[list(own.rows)]
    sequences = list(zip(data["prompt_ids"], data["completion_ids"]))
    rows = tuple(data.get("pack", own.rows))
    return CompletionBatch(rows, collate(sequences, plan.longest[micro], data.get("scored")))


def collate_prompts(dataset: Dataset, table: RowTable, plan: WindowPlan, micro: int, rank: int) -> PromptBatch:
    """Collate one rank's share of a window's prompts."""
    own = plan.micro_batches[micro][rank]
    prompts = dataset[list(own.rows)]["prompt_ids"] if own.rows else []
    return PromptBatch(own.rows, tuple(map(tuple, prompts)))


class MicroBatches(Sequence[AnyBatch]):
    """One rank's micro-batches of a plan, collated on access."""

    def __init__(
        self,
        function: Collate,
        dataset: Dataset | PackedRows,
        table: RowTable,
        plan: WindowPlan,
        rank: int,
    ) -> None:
        self.function, self.dataset, self.table, self.plan, self.rank = function, dataset, table, plan, rank

    def __len__(self) -> int:
        return len(self.plan.micro_batches)

    def __getitem__(self, micro: int) -> AnyBatch:  # type: ignore[override]
        if not 0 <= micro < len(self):
            raise IndexError(micro)
        return self.function(self.dataset, self.table, self.plan, micro, self.rank)


class EpochWindows(torch.utils.data.Dataset[tuple[WindowPlan, Sequence[AnyBatch]]]):
    """A map-style dataset for a torch ``DataLoader``: window index -> (plan, this rank's collated micro-batches)."""

    def __init__(
        self, function: Collate, dataset: Dataset | PackedRows, sampler: WindowSampler, epoch: int, rank: int
    ) -> None:
        self.function, self.dataset, self.sampler, self.epoch, self.rank = function, dataset, sampler, epoch, rank

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    def __getitem__(self, step: int) -> tuple[WindowPlan, Sequence[AnyBatch]]:
        plan = self.sampler.plan(self.epoch, step)
        return plan, list(MicroBatches(self.function, self.dataset, self.sampler.table, plan, self.rank))
