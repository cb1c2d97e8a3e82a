"""Rollouts without a model: dummies of shorter ranks, stops, failures of continuous batching, groups of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from alignment.config.errors import TrainingError
from alignment.rollout import continuous, weights
from alignment.rollout import engine as engine_module
from alignment.rollout.backend import Completion, Generation, RolloutRequest, Sampling, Work
from alignment.rollout.continuous import ContinuousBackend
from alignment.rollout.engine import RolloutEngine
from alignment.rollout.memory import Room
from alignment.run.stop import Cut

SAMPLING = Sampling(4, (1,), 0, extra={"min_new_tokens": 3})
REQUEST = RolloutRequest([(5, 6), (7,)], 2, SAMPLING, seed=3)


class Recorded:
    """A backend that records its calls; the token of a completion is its prompt's first."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Work], Sampling, bool]] = []

    @contextlib.contextmanager
    def session(self, parts: Sequence[Sequence[Work]], generation: Generation) -> Iterator[None]:
        yield

    def generate(self, part: list[Work], generation: Generation) -> list[list[Completion]]:
        self.calls.append((part, generation.sampling, generation.by_layer))
        return [[Completion((work.ids[0],), True)] * work.count for work in part]


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> RolloutEngine:
    policy: Any = SimpleNamespace(partitioned=True, device=torch.device("cpu"), scorer=SimpleNamespace(model="model"))
    made: Any = RolloutEngine(policy, longest_context=9)
    made.backend = Recorded()
    monkeypatch.setattr(made, "_decide", lambda request: (Room(gather=False, batch_size=2), made.backend))
    monkeypatch.setattr(made, "_ready", lambda seed, by_layer: contextlib.nullcontext())
    monkeypatch.setattr(engine_module, "REQUESTS", SimpleNamespace(may_cut=False, asked=lambda: "SIGTERM"))
    monkeypatch.setattr(engine_module, "largest_numbers", lambda numbers: [max(4.0, *numbers)])
    found: RolloutEngine = made
    return found


def test_a_rank_with_fewer_chunks_generates_dummies(rollout: Any) -> None:
    """Here the other rank has 4 chunks: every rank gathers the layers equally often."""
    found = rollout.generate(REQUEST)
    assert found == [[Completion((5,), True)] * 2, [Completion((7,), True)] * 2]
    own, dummies = rollout.backend.calls[:2], rollout.backend.calls[2:]
    assert own == [([Work(0, (5, 6), 2)], SAMPLING, True), ([Work(1, (7,), 2)], SAMPLING, True)]
    assert dummies == [([Work(-1, (0,), 1)], Sampling(1, (1,), 0), True)] * 2


@pytest.mark.parametrize("seen", [[1], [0, 0, 1], [0, 0, 0, 0]])
def test_a_stop_cuts_the_rollout_of_every_rank(seen: list[int], rollout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``seen``: whether any rank has been asked, before each chunk."""
    told: list[Any] = []
    answers, cut = iter([4, *seen, seen[-1]]), seen[-1] == 1
    monkeypatch.setattr(engine_module, "largest_numbers", lambda given: told.append(given) or [float(next(answers))])
    monkeypatch.setattr(engine_module.REQUESTS, "may_cut", True)
    with pytest.raises(Cut) if cut else contextlib.nullcontext():
        rollout.generate(REQUEST)
    assert len(rollout.backend.calls) == len(seen) - cut
    assert told == [[2], *[[True]] * len(seen), [cut]]


@pytest.mark.parametrize(
    ("rejects", "running", "error", "said"),
    [
        (True, [], None, "a prompt was rejected"),
        (False, [True, True, False], None, "its thread has exited"),
        (False, [True], "out of\npages", "out of pages"),
    ],
)
def test_failures_of_continuous_batching(
    rejects: bool, running: list[bool], error: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, backend = mock.Mock(), ContinuousBackend()
    manager.get_result.return_value, manager.is_running.side_effect = None, running
    if rejects:
        manager.add_request.return_value = None
    monkeypatch.setattr(continuous, "generation_error", lambda manager: error)
    monkeypatch.setattr(backend, "_kept", manager)
    generation: Any = SimpleNamespace(sampling=SAMPLING, tick=lambda: pytest.fail("there is no progress"))
    with pytest.raises(TrainingError, match=rf"^rollout_backend='continuous': generation failed \({said}\); set a sm"):
        backend.generate([Work(0, (5,), 2)], generation)
    assert manager.get_result.call_count == len(running) and (error or not any(running[-1:]))


def test_groups_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_BYTES_AT_ONCE", 10)
    monkeypatch.setattr(weights, "whole_bytes", lambda size: size)
    assert list(weights._groups([4, 6, 3, 6, 12, 1])) == [[4, 6], [3, 6, 12], [1]]
    assert list(weights._groups([9, 1])) == [[9, 1]] and list(weights._groups([])) == []
