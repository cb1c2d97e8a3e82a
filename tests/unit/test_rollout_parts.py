"""Rollouts without a model: dummies of shorter ranks, stops, failures of continuous batching, groups of weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from alignment.config.errors import TrainingError
from alignment.rollout import continuous, weights
from alignment.rollout.backend import Completion, Sampling, Work
from alignment.rollout.continuous import ContinuousBackend

SAMPLING = Sampling(4, (1,), 0, extra={"min_new_tokens": 3})
FIRST, SECOND = Completion((5,), True), Completion((7,), True)


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
    monkeypatch.setattr(continuous, "generation_error", {manager: error}.__getitem__)
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
