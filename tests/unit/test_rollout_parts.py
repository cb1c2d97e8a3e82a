"""Rollouts without a model: dummies of shorter ranks, stops, failures of continuous batching, groups of weights."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from alignment.config.errors import TrainingError
from alignment.rollout import continuous, weights
from alignment.rollout import engine as engine_module
from alignment.rollout.backend import Completion, RolloutRequest, Sampling, Work
from alignment.rollout.continuous import ContinuousBackend
from alignment.rollout.engine import RolloutEngine
from alignment.rollout.memory import Room
from alignment.run.stop import Cut

SAMPLING = Sampling(4, (1,), 0, extra={"min_new_tokens": 3})
FIRST, SECOND = Completion((5,), True), Completion((7,), True)


@pytest.mark.parametrize("asked", [None, [1], [0, 0, 1], [0, 0, 0, 0]])
def test_ranks_generate_and_stop_together(asked: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank has two chunks, another one four. ``asked``: whether a rank has to stop, before each chunk."""
    told, cut = list[Any](), asked is not None and asked[-1] == 1
    answers = iter([4, *(asked or []), cut])
    monkeypatch.setattr(engine_module, "largest_numbers", lambda given: told.append(given) or [float(next(answers))])
    monkeypatch.setattr(engine_module, "REQUESTS", SimpleNamespace(may_cut=asked is not None, asked=lambda: "SIGTERM"))
    policy: Any = SimpleNamespace(partitioned=True, device=torch.device("cpu"), scorer=mock.Mock())
    rollout, backend = RolloutEngine(policy, longest_context=9), mock.MagicMock()
    backend.generate.side_effect = lambda part, generation: [[FIRST if part[0].prompt == 0 else SECOND] * 2]
    monkeypatch.setattr(rollout, "_decide", lambda request: (Room(gather=False, batch_size=2), backend))
    monkeypatch.setattr(rollout, "_ready", lambda seed, by_layer: contextlib.nullcontext())
    with pytest.raises(Cut) if cut else contextlib.nullcontext():
        assert rollout.generate(RolloutRequest([(5, 6), (7,)], 2, SAMPLING, seed=3)) == [[FIRST] * 2, [SECOND] * 2]
    chunks, dummy = [[Work(0, (5, 6), 2)], [Work(1, (7,), 2)]], [Work(-1, (0,), 1)]
    expected = [*((chunk, SAMPLING) for chunk in chunks), *[(dummy, Sampling(1, (1,), 0))] * 2]
    found = [(part, generation.sampling) for part, generation in (call.args for call in backend.generate.mock_calls)]
    assert found == expected[: None if asked is None else len(asked) - cut]
    assert told == [[2]] if asked is None else [[2], *[[True]] * len(asked), [cut]]


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
    assert manager.get_result.call_count == len(running)


def test_groups_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_BYTES_AT_ONCE", 10)
    monkeypatch.setattr(weights, "whole_bytes", lambda size: size)
    assert list(weights._groups([4, 6, 3, 6, 12, 1])) == [[4, 6], [3, 6, 12], [1]]
    assert list(weights._groups([9, 1])) == [[9, 1]] and list(weights._groups([])) == []
