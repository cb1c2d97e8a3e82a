"""Collate planned rows into tensors.

A batch is a set of *sequences*, each a prompt and a completion; only completion tokens are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import pad

from alignment.data.layout import Group, Layout
from alignment.data.packed_rows import PackedRows
from alignment.data.transfer import OnDevice
from alignment.data.windows import WindowPlan, WindowSampler

_BLOCK_COST = 256  # cost of an additional pass through the model, in padded tokens
TokenIds = Sequence[int]
Packed = TypeVar("Packed", bound=OnDevice)


class AnyBatch(Protocol):
    """The interface of all batches: the IDs of their rows."""

    @property
    def rows(self) -> tuple[int, ...]: ...


BatchT = TypeVar("BatchT", bound=AnyBatch)


@dataclass(frozen=True)
class Batch(OnDevice):
    """Sequences for one forward pass.

    Attributes:
        inputs: what the model gets as keyword arguments: ``input_ids`` (B, T) int64, padded on the right, and
            ``attention_mask`` (B, T) int64, 1 for tokens and 0 for padding. Others have B rows as well. See
            :meth:`packed` for those of a single row.
        positions: (N,) int64 indices into the flattened (B*T) positions: the position before each scored token.
        targets: (N,) int64, the scored completion tokens.
        segments: (N,) int64, the sequence to which each scored token belongs.
        lengths: (S,) int64, the number of scored tokens of each sequence.
        longest: largest N on any rank in this forward pass.
        blocks: ``(rows, width)`` of groups of consecutive rows of the inputs; everything beyond the width is padding.
        ends: (S,) int64, the position of each sequence's last token, if that is scored.
        sizes: the number of tokens of each row of the inputs; empty if they cannot be packed.
        groups: the rows with a common prefix.
    """

    inputs: dict[str, Any]
    positions: Tensor
    targets: Tensor
    segments: Tensor
    lengths: Tensor
    longest: int
    blocks: tuple[tuple[int, int], ...]
    ends: Tensor
    sizes: tuple[int, ...] = ()
    groups: tuple[Group, ...] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences, including prompts, without padding."""
        return sum(self.sizes) if len(self.lengths) else 0

    def packed(self, share: bool = True) -> Batch:
        """Return the same sequences in one row without padding; with ``share``, those of a group share their prefix.

        The inputs are then ``input_ids`` and ``position_ids`` (1, T), and the ``layout`` that attention follows, see
        :class:`~alignment.data.layout.Layout`. A batch that has other inputs is returned unchanged.
        """
        ids = self.inputs["input_ids"]
        if not self.sizes or self.inputs.keys() - PADDED_INPUTS or ids.device.type != "cpu":
            return self
        layout = Layout.of(self.sizes, self.groups if share else ())
        row = ids.new_empty((1, layout.pieces[-1].stop))
        for own, size, piece in zip(ids, self.sizes, layout.sequences):
            row[0, piece.attended] = own[:size]
        positions, ends = (
            layout.places(old.div(ids.shape[1], rounding_mode="floor"), old % ids.shape[1])
            for old in (self.positions, self.ends)
        )
        inputs = {"input_ids": row, "position_ids": layout.position_ids, "layout": layout}
        return replace(self, inputs=inputs, positions=positions, ends=ends, blocks=())


def packed(batch: Packed, share: bool, leave: Collection[str] = ()) -> Packed:
    """Return the batch with every :class:`Batch` in it packed, except those in fields named in ``leave``."""
    if isinstance(batch, Batch):
        return batch.packed(share)  # type: ignore[return-value]
    parts = {name: value for name, value in vars(batch).items() if isinstance(value, OnDevice) and name not in leave}
    return replace(batch, **{name: packed(value, share, leave) for name, value in parts.items()})


def collate(
    sequences: Sequence[tuple[TokenIds, TokenIds]],
    longest: int,
    scored: Sequence[Sequence[bool] | None] | None = None,
    groups: Sequence[tuple[int, ...]] = (),
) -> Batch:
    """Pad (prompt, completion) pairs on the right. An empty batch gets one dummy token, which is not scored.

    The fill value 0 is neither scored nor attended to by scored tokens. Rows are in the order of the sequences, or
    sorted by descending length and cut into blocks if that saves padding. ``scored`` has a mask of the scored
    completion tokens of each sequence; None for all. ``groups`` are sequences that may begin with the same tokens.
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
    sizes = torch.zeros(count, dtype=torch.long)
    sizes[rows] = torch.tensor(totals)
    lengths = torch.tensor([len(each) for each in targets], dtype=torch.long)
    return Batch(
        inputs={"input_ids": input_ids, "attention_mask": attention_mask},
        positions=torch.cat(positions) if positions else empty,
        targets=torch.cat(targets) if targets else empty,
        segments=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        lengths=lengths,
        longest=longest,
        blocks=blocks,
        ends=torch.tensor(
            [row * width + total - 1 for row, total, _ in zip(rows, totals, sequences)], dtype=torch.long
        ),
        sizes=tuple(sizes.tolist()),
        groups=tuple(_group([rows[number] for number in group], input_ids, sizes) for group in groups),
    )


PADDED_INPUTS = frozenset({"input_ids", "attention_mask"})


def merged(batches: Sequence[Batch]) -> Batch:
    """Return the sequences of several batches in their order as one batch, padded to the longest of all.

    The batches are padded themselves, on the host, and have no inputs but ``PADDED_INPUTS``.
    """
    parts, row, sequence = [], 0, 0
    width = max(each.inputs["input_ids"].shape[1] for each in batches)
    for each in batches:
        count, old = each.inputs["input_ids"].shape
        inputs = {name: pad(value, (0, width - old)) for name, value in each.inputs.items()}
        positions, ends = ((row + places // old) * width + places % old for places in (each.positions, each.ends))
        segments = each.segments + sequence
        groups = tuple(Group(tuple(row + n for n in group.sequences), group.prefix) for group in each.groups)
        parts.append(replace(each, inputs=inputs, positions=positions, ends=ends, segments=segments, groups=groups))
        row, sequence = row + count, sequence + len(each.lengths)
    tensors = ("positions", "targets", "segments", "lengths", "ends")
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in tensors}
    for name in ("blocks", "sizes", "groups"):
        joined[name] = tuple(each for part in parts for each in getattr(part, name))
    inputs = {name: torch.cat([part.inputs[name] for part in parts]) for name in parts[0].inputs}
    return Batch(inputs=inputs, longest=sum(part.longest for part in parts), **joined)


def _group(rows: list[int], input_ids: Tensor, sizes: Tensor) -> Group:
    """Return these rows as a group: its prefix leaves at least one token of the shortest row."""
    most = int(sizes[rows].min()) - 1
    equal = (input_ids[rows, :most] == input_ids[rows[0], :most]).all(0)
    return Group(tuple(rows), int(equal.long().cumprod(0).sum()))


def ends(batch: Batch, longest: int | None = None) -> Batch:
    """Return the same sequences with their last tokens only, from which a reward model computes its score.

    Unlike in other batches, a position is that of the token itself, not the one before it. Each of the S sequences
    needs a completion token. ``longest`` is the largest S on any rank in this forward pass; None for the batch's own.
    """
    # On a GPU, the host would wait for the answer.
    assert batch.lengths.is_cuda or bool(batch.lengths.all()), "a sequence without completion tokens has no known end"
    count, last = len(batch.lengths), batch.lengths.cumsum(0) - 1
    return replace(
        batch,
        positions=batch.ends,
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


# Collates one rank's micro-batch: (dataset, plan, index of the micro-batch, rank); see Kind.collate.
Collate = Callable[[Any, WindowPlan, int, int], AnyBatch]


@dataclass(frozen=True, eq=False)
class MicroBatches(Sequence[AnyBatch]):
    """One rank's micro-batches of a plan, collated on access. The dataset is PackedRows if packing is used."""

    function: Collate
    dataset: Dataset | PackedRows
    plan: WindowPlan
    rank: int

    def __len__(self) -> int:
        return len(self.plan.micro_batches)

    def __getitem__(self, micro: int) -> AnyBatch:  # type: ignore[override]
        if not 0 <= micro < len(self):
            raise IndexError(micro)
        return self.function(self.dataset, self.plan, micro, self.rank)


@dataclass(frozen=True, eq=False)
class EpochWindows(torch.utils.data.Dataset[tuple[WindowPlan, Sequence[AnyBatch]]]):
    """A map-style dataset for a torch ``DataLoader``: window index -> (plan, this rank's collated micro-batches)."""

    function: Collate
    dataset: Dataset | PackedRows
    sampler: WindowSampler
    epoch: int
    rank: int

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    def __getitem__(self, step: int) -> tuple[WindowPlan, Sequence[AnyBatch]]:
        plan = self.sampler.plan(self.epoch, step)
        return plan, [self.function(self.dataset, plan, n, self.rank) for n in range(len(plan.micro_batches))]
