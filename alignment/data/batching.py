"""From planned rows to tensors.

A batch is a set of *sequences*, each a prompt and a completion; only completion tokens are scored. Consumers see
sequences, never rows of a matrix, so that several sequences may share a row of ``input_ids`` later on.
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

# What one more pass through the model costs, as a number of padded tokens.
_BLOCK_COST = 256
TokenIds = Sequence[int]
Self = TypeVar("Self", bound="OnDevice")


class AnyBatch(Protocol):
    """What the batches of every method have: the ids of the rows that they are made of."""

    @property
    def rows(self) -> tuple[int, ...]: ...


BatchT = TypeVar("BatchT", bound=AnyBatch)


@dataclass(frozen=True)
class OnDevice:
    """Something whose tensor fields move to a device together, in one copy that the host does not wait for."""

    def to(self: Self, device: torch.device, leave: Collection[str] = ()) -> Self:
        """The same batch with every tensor on ``device``, but for those in the fields that ``leave`` names."""
        return self._with(iter(transferred(self._tensors(leave), device)), leave)

    def _tensors(self, leave: Collection[str]) -> list[Tensor]:
        """Those of this batch and of the batches in it, in the order of the fields."""
        found: list[Tensor] = []
        for value in self._moving(leave).values():
            found += [value] if isinstance(value, Tensor) else value._tensors(leave)
        return found

    def _with(self: Self, tensors: Iterator[Tensor], leave: Collection[str]) -> Self:
        """The same batch with other tensors, in the order of :meth:`_tensors`."""
        values = self._moving(leave).items()
        return replace(
            self, **{n: next(tensors) if isinstance(v, Tensor) else v._with(tensors, leave) for n, v in values}
        )

    def _moving(self, leave: Collection[str]) -> dict[str, Tensor | OnDevice]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in leave}
        return {name: value for name, value in values.items() if isinstance(value, (Tensor, OnDevice))}


@dataclass(frozen=True)
class Batch(OnDevice):
    """Sequences for one forward.

    Attributes:
        input_ids: (B, T) int64, padded on the right.
        attention_mask: (B, T) int64, 1 on real tokens.
        positions: (N,) int64 into the flattened (B*T) positions: the one before each completion token that is scored.
        targets: (N,) int64, the completion tokens that are scored.
        segments: (N,) int64, the sequence that each of them belongs to.
        lengths: (S,) int64, how many each sequence has.
        longest: the largest N of any rank in this forward.
        blocks: ``(rows, width)`` of consecutive rows of ``input_ids``; right of its width a block is padding.
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
        """Real tokens, prompts included."""
        return int(self.attention_mask.sum()) if len(self.lengths) else 0


def collate(
    sequences: Sequence[tuple[TokenIds, TokenIds]], longest: int, scored: Sequence[Sequence[bool] | None] | None = None
) -> Batch:
    """Pad (prompt, completion) pairs on the right; no sequence at all gives one dummy token that nothing scores.

    The fill value is 0 and is never scored nor attended to by a token that is, so no pad token is needed. Rows are in
    the order of the sequences, or where that saves padding from the longest to the shortest, cut into blocks.
    ``scored`` says of each sequence which of its completion tokens are scored; None for all.
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
    """The same sequences, seen at their last tokens only, where a reward model reads its score.

    Unlike in other batches a position is that of the token itself, not of the one before it; S of each are left.

    Args:
        batch: S sequences, each of at least one completion token; none at all is possible.
        longest: the largest S of any rank in this forward; this batch's own S where None.
    """
    assert bool(batch.lengths.all()), "a sequence without completion tokens has no known end"
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
    """``(rows, width)`` of blocks of rows that fall in width, so that padding and the cost of each block are least."""
    count, width = len(widths), np.asarray(widths, dtype=np.int64)
    least = np.zeros(count + 1, dtype=np.int64)  # [n]: the cost of the first n rows
    begins = np.zeros(count + 1, dtype=np.int64)  # [n]: where the last of their blocks begins
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
    """PromptCompletion answers with a label, for KTO.

    Attributes:
        rows: row ids.
        partners: (R,) row ids of the rows whose completions make the mismatched sequences; -1: none.
        labels: (R,) bool.
        matched: R sequences, each prompt with its own completion.
        mismatched: K <= R sequences, the prompts that have a partner with the partner's completion.
        joint: the R + K sequences of both, for a model that needs one pass without gradients.
    """

    rows: tuple[int, ...]
    partners: tuple[int, ...]
    labels: Tensor
    matched: Batch
    mismatched: Batch
    joint: Batch


@dataclass(frozen=True)
class PreferenceBatch(OnDevice):
    """Pairs: ``pairs`` holds 2P sequences, the chosen answers first; ``margins`` (P,) fp32, where rows have them."""

    rows: tuple[int, ...]
    pairs: Batch
    margins: Tensor | None = None


@dataclass(frozen=True)
class CompletionBatch(OnDevice):
    """Answers to imitate: ``completions`` holds one sequence per entry of ``rows``; of a pack there may be several."""

    rows: tuple[int, ...]
    completions: Batch


@dataclass(frozen=True)
class PromptBatch(OnDevice):
    """Prompts to answer, as token ids: nothing to score yet, so no tensors."""

    rows: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]


# Makes one rank's batch of a micro-batch: (dataset, table, plan, number of the micro-batch, rank). The dataset may be
# PackedRows for a method that packs.
Collate = Callable[[Any, RowTable, WindowPlan, int, int], AnyBatch]


def collate_unpaired(dataset: Dataset, table: RowTable, plan: WindowPlan, micro: int, rank: int) -> UnpairedBatch:
    """The tensors of one rank's micro-batch of labelled single answers."""
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
    """The tensors of one rank's micro-batch of (chosen, rejected) pairs."""
    own = plan.micro_batches[micro][rank]
    return _pairs_of(own, dataset[list(own.rows)], plan.longest[micro])


def collate_preference_margin(
    dataset: Dataset, table: RowTable, plan: WindowPlan, micro: int, rank: int
) -> PreferenceBatch:
    """The tensors of one rank's micro-batch of (chosen, rejected, margin)."""
    own = plan.micro_batches[micro][rank]
    data = dataset[list(own.rows)]
    margins = torch.tensor(data["margin"], dtype=torch.float32)
    return replace(_pairs_of(own, data, plan.longest[micro]), margins=margins)


def collate_preference_ids(
    rows: tuple[int, ...], pairs: Sequence[tuple[TokenIds, TokenIds, TokenIds]], longest: int
) -> PreferenceBatch:
    """The tensors of pairs that are given as token ids.

    Args:
        rows: (P,) row ids, for messages.
        pairs: P times prompt, first and second answer; none at all is possible.
        longest: the largest number of answers' tokens of any rank in this forward.
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
    """The tensors of one rank's micro-batch of answers to imitate: the sequences of packs are as those of rows."""
    own = plan.micro_batches[micro][rank]
    data = dataset[list(own.rows)]
    sequences = list(zip(data["prompt_ids"], data["completion_ids"]))
    rows = tuple(data.get("pack", own.rows))
    return CompletionBatch(rows, collate(sequences, plan.longest[micro], data.get("scored")))


def collate_prompts(dataset: Dataset, table: RowTable, plan: WindowPlan, micro: int, rank: int) -> PromptBatch:
    """One rank's share of the prompts of a window."""
    own = plan.micro_batches[micro][rank]
    prompts = dataset[list(own.rows)]["prompt_ids"] if own.rows else []
    return PromptBatch(own.rows, tuple(map(tuple, prompts)))


class MicroBatches(Sequence[AnyBatch]):
    """One rank's micro-batches of a plan, collated each time they are asked for."""

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
    """Window number -> (plan, this rank's micro-batches, collated); a map-style dataset for a torch ``DataLoader``."""

    def __init__(
        self, function: Collate, dataset: Dataset | PackedRows, sampler: WindowSampler, epoch: int, rank: int
    ) -> None:
        self.function, self.dataset, self.sampler, self.epoch, self.rank = function, dataset, sampler, epoch, rank

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    def __getitem__(self, step: int) -> tuple[WindowPlan, Sequence[AnyBatch]]:
        plan = self.sampler.plan(self.epoch, step)
        return plan, list(MicroBatches(self.function, self.dataset, self.sampler.table, plan, self.rank))
