"""Moving tensors: batches to a device, in one copy from pinned memory, and reduced ones to that of the collectives.

``tests/engine/test_fake_cuda.py`` shows that the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from alignment.data import transfer
from alignment.data.batching import collate
from alignment.data.kinds.unpaired import UnpairedBatch
from alignment.data.transfer import transferred
from alignment.engines import collectives

DEVICE = torch.device("cpu", 0)  # another device than ``cpu``, with the same memory
TENSORS = [
    torch.arange(7),
    torch.tensor([True, False, True]),
    torch.zeros(0, dtype=torch.long),
    torch.linspace(-1, 1, 6).reshape(2, 3),
    torch.tensor(5.5, dtype=torch.float64),
    torch.ones(9, dtype=torch.int8),
]


@pytest.fixture(autouse=True)
def pinned() -> Iterator[list[Tensor]]:
    """Record the pinned memory that is allocated."""
    taken: list[Tensor] = []
    empty = torch.empty

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        assert kwargs.pop("pin_memory") is True
        taken.append(empty(*args, **kwargs))
        return taken[-1]

    with mock.patch.object(transfer.torch, "empty", recorded):
        yield taken


def test_every_tensor_arrives_with_its_dtype_shape_and_values(pinned: list[Tensor]) -> None:
    found = transferred(TENSORS, DEVICE)
    for one, other in zip(found, TENSORS, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
        assert one.storage_offset() * one.element_size() % 64 == 0
    assert len({one.untyped_storage().data_ptr() for one in found}) == len(pinned) == 1, "one copy for all of them"


def test_tensors_on_the_device_are_not_copied(pinned: list[Tensor]) -> None:
    assert all(one is other for one, other in zip(transferred(TENSORS, torch.device("cpu")), TENSORS, strict=True))
    assert pinned == []


def test_memory_of_a_pending_copy_is_not_reused(pinned: list[Tensor]) -> None:
    """Each transfer allocates its own memory; torch's allocator reuses it when the copy has finished."""
    for value in range(3):
        transferred([torch.full((4,), value)], DEVICE)
    assert [int(each.view(torch.long)[0]) for each in pinned] == [0, 1, 2]


def test_a_batch_moves_all_tensors_except_excluded_fields() -> None:
    matched, mismatched = collate([((3, 4), (5, 6, 7)), ((8,), (9,))], 4), collate([((3, 4), (9,))], 1)
    given = UnpairedBatch((0, 1), (1, -1), torch.tensor([True, False]), matched, mismatched, matched)
    moved = given.to(DEVICE, ("joint", "mismatched", "attention_mask"))
    assert moved.joint is given.joint and moved.mismatched is given.mismatched
    assert moved.matched.inputs["attention_mask"] is given.matched.inputs["attention_mask"]
    assert moved.matched.inputs["input_ids"] is not given.matched.inputs["input_ids"]
    assert torch.equal(moved.matched.inputs["input_ids"], given.matched.inputs["input_ids"])
    for name in ("positions", "targets", "segments", "lengths"):
        mine, theirs = (getattr(one.matched, name) for one in (moved, given))
        assert torch.equal(mine, theirs) and mine is not theirs, name


def test_tensors_are_reduced_on_the_communication_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    monkeypatch.setattr(collectives, "device", lambda: torch.device("meta"))
    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(collectives.dist, name, lambda values, **_: devices.append(values.device.type))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self)  # meta tensors have no values to copy back
    for collective in (collectives.sum_over_ranks, collectives.copied_from_first_rank):
        values = torch.ones(2)
        assert collective(values) is values
    assert devices == ["meta"] * 2
