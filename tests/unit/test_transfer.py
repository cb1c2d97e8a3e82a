"""Moving batches to a device: one copy from pinned memory, with the same values."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from alignment.data import transfer
from alignment.data.batching import collate
from alignment.data.kinds.unpaired import UnpairedBatch
from alignment.data.transfer import transferred
from tools.waits.device import DEVICE, HOST, StandIn, on_host

TENSORS = [
    torch.arange(7),
    torch.tensor([True, False, True]),
    torch.zeros(0, dtype=torch.long),
    torch.linspace(-1, 1, 6).reshape(2, 3),
    torch.tensor(5.5, dtype=torch.float64),
    torch.ones(9, dtype=torch.int8),
]


def batch() -> UnpairedBatch:
    matched, mismatched = collate([((3, 4), (5, 6, 7)), ((8,), (9,))], 4), collate([((3, 4), (9,))], 1)
    return UnpairedBatch((0, 1), (1, -1), torch.tensor([True, False]), matched, mismatched, matched)


def test_every_tensor_arrives_with_its_dtype_shape_and_values() -> None:
    with StandIn() as stand_in:
        given = [tensor.to("cpu:0").cpu() for tensor in TENSORS]
        stand_in.waits.clear()
        found = transferred(given, DEVICE)
        assert not any(map(on_host, found)) and not stand_in.waits
    for one, other in zip(found, TENSORS, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
        assert one.storage_offset() * one.element_size() % 64 == 0
    assert len({one.untyped_storage().data_ptr() for one in found}) == 1, "one copy for all of them"


def test_tensors_on_the_device_are_not_copied() -> None:
    assert all(one is other for one, other in zip(transferred(TENSORS, torch.device("cpu")), TENSORS, strict=True))
    with StandIn():
        here, away = torch.ones(2, device=DEVICE), torch.zeros(2)
        found = transferred([away, here], DEVICE)
    assert found[1] is here and found[0].tolist() == [0, 0]


def test_memory_of_a_pending_copy_is_not_reused() -> None:
    """Each transfer allocates its own memory; torch's allocator reuses it when the copy has finished."""
    taken: list[Tensor] = []
    empty = torch.empty

    def recorded(*args: object, **kwargs: object) -> Tensor:
        assert kwargs.pop("pin_memory") is True
        taken.append(empty(*args, **kwargs))  # type: ignore[call-overload]
        return taken[-1]

    with mock.patch.object(transfer.torch, "empty", recorded), StandIn():
        for value in range(3):
            transferred([torch.full((4,), value)], DEVICE)
    assert len({each.data_ptr() for each in taken}) == 3
    assert [int(each.view(torch.long)[0]) for each in taken] == [0, 1, 2]


def test_a_batch_moves_all_tensors_except_excluded_fields() -> None:
    with StandIn() as stand_in:
        given = batch()
        moved = given.to(DEVICE, ("joint", "mismatched", "attention_mask"))
        assert not stand_in.waits
        assert moved.joint is given.joint and moved.mismatched is given.mismatched
        assert not any(map(on_host, (moved.labels, moved.matched.targets, moved.matched.inputs["input_ids"])))
        assert moved.matched.inputs["attention_mask"] is given.matched.inputs["attention_mask"]
    assert torch.equal(moved.matched.inputs["input_ids"], given.matched.inputs["input_ids"])
    for name in ("positions", "targets", "segments", "lengths"):
        assert torch.equal(getattr(moved.matched, name), getattr(given.matched, name)), name
    assert replace(moved, labels=given.labels, matched=given.matched) == given


def test_the_simulated_device_ignores_meta_tensors() -> None:
    """transformers only computes the rotary frequencies of a model that it saw on the meta device."""
    with StandIn():
        found = [torch.empty(2, device="meta").device, torch.empty(2, device="cpu:0").device, torch.empty(2).device]
    assert found == [torch.device("meta"), DEVICE, HOST]


@pytest.mark.parametrize("move", ["to", "tensor"])
def test_the_simulated_device_records_a_pageable_copy(move: str) -> None:
    with StandIn() as stand_in:
        torch.ones(2).to(DEVICE, non_blocking=True) if move == "to" else torch.tensor([1.0], device=DEVICE)
    assert [wait.kind for wait in stand_in.waits] == ["a pageable copy"]


@pytest.mark.parametrize(
    ("asked", "waits"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: float(x.sum()), 1),
        (lambda x: bool((x > 0).all()), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: torch.repeat_interleave(x, (x > 0).long()), 1),
        (lambda x: torch.repeat_interleave(x, (x > 0).long(), output_size=2), 0),
        (lambda x: x.new_tensor([1.0]), 1),
        (lambda x: x.new_full((), 1.0), 0),
        (lambda x: x[torch.tensor([0])], 1),
        (lambda x: x[1:].sum() * 2 + torch.tensor(1.0), 0),
        (lambda x: x.where(x > 0, 0).to(torch.float64), 0),
        (lambda x: torch.ones(3).sum().item(), 0),
    ],
)
def test_operations_that_synchronize(asked: object, waits: int) -> None:
    with StandIn() as stand_in:
        x = torch.ones(2, device=DEVICE)
        asked(x)  # type: ignore[operator]
    assert len(stand_in.waits) == waits, stand_in.waits
