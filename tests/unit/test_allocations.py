"""The allocator that counts, by which memory plans are judged: what it sees, and its phases, peaks and limit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from support.allocations import Allocations, library
from torch import nn
from torch.profiler import ProfilerActivity, profile

MIB = 2**20


@pytest.fixture
def counted() -> Iterator[Allocations]:
    with Allocations(library()).active() as allocations:
        yield allocations


def test_bytes_in_use_and_their_peak_in_each_phase(counted: Allocations) -> None:
    kept = torch.ones(MIB)
    counted.begin()
    with counted.phase("first"):
        temporary = torch.empty(2 * MIB, dtype=torch.uint8)
        del temporary
        more = torch.empty(MIB, dtype=torch.uint8)
    with counted.phase("second"):
        del kept
        more.untyped_storage().resize_(3 * MIB)
    assert counted.peaks["first"] == 2 * MIB and counted.after["first"] == MIB
    # While a storage grows, its old block exists beside the new one.
    assert counted.peaks["second"] == MIB and counted.after["second"] == 3 * MIB - 4 * MIB
    assert counted.owns(more)
    del more
    with counted.phase("first"):
        pass
    assert counted.peaks["first"] == 2 * MIB and counted.after["first"] == -4 * MIB


def test_memory_of_earlier_tensors_of_files_and_of_other_threads(counted: Allocations) -> None:
    counted._library.stop_counting()
    earlier = torch.ones(MIB)
    counted._library.count_allocations()
    before = counted.live
    assert not counted.owns(earlier)
    del earlier
    assert counted.live == before, "what was never counted is not subtracted"
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(torch.empty(MIB, dtype=torch.uint8)))
    thread.start()
    thread.join()
    assert counted.live == before + MIB
    found.clear()
    assert counted.live == before


def test_the_peak_is_that_of_the_profilers_memory_events(counted: Allocations) -> None:
    """Forward and backward passes with temporaries that no Python code sees, and gradients that autograd adds up."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
    rows = torch.randn(512, 64)

    def computed() -> None:
        for _ in range(2):
            states = model(rows) + rows
            query = states.view(1, 4, 128, 64).contiguous()
            attended = nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
            (attended * states.view(1, 4, 128, 64)).cumsum(2).pow(2).sum().backward()

    computed()  # so that gradients exist, and only what this does is compared
    model.zero_grad(set_to_none=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        counted.begin()
        start = counted.live
        with counted.phase("passes"):
            computed()
        assert counted.live == start
    result = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = list(result.experimental_event_tree())
    totals = []
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.name == "[memory]":
            totals.append(event.extra_fields.total_allocated)
    assert counted.peaks["passes"] == pytest.approx(max(totals), abs=0) and counted.peaks["passes"] > MIB


def test_a_request_beyond_the_limit_is_refused_as_by_a_full_gpu(counted: Allocations) -> None:
    counted.begin()
    counted.limit(MIB)
    held = torch.empty(MIB // 2, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError, match="exceed the limit"):
        torch.empty(MIB // 2 + 1, dtype=torch.uint8)
    assert counted.refused()[0] == MIB // 2
    del held
    whole = torch.empty(MIB, dtype=torch.uint8)
    assert counted.owns(whole)
    counted.limit(None)
    assert torch.empty(2 * MIB, dtype=torch.uint8).numel() == 2 * MIB


def test_one_byte_less_than_a_peak_stops_the_operation_that_makes_it() -> None:
    def computed() -> None:
        held = torch.ones(MIB)
        torch.cat([held, held])

    with Allocations(library()).active() as measured:
        measured.begin()
        with measured.phase("step"):
            computed()
    for less in (0, 1):
        with Allocations(library(), {"step": measured.peaks["step"] - less}).active() as limited:
            limited.begin()
            with pytest.raises(torch.OutOfMemoryError) if less else nullcontext(), limited.phase("step"):
                computed()
            computed()
