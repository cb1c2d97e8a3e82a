"""Parts of a checkpoint without an engine: frozen tensors, the files of a rank, another split, and what is refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from alignment import SFTConfig
from alignment.checkpoint import resume, writer
from alignment.checkpoint.frozen import FrozenTensors, frozen_file
from alignment.checkpoint.manifest import FileRecord, Manifest
from alignment.checkpoint.optimizer_state import _is_plain, group_settings, restore_group_settings
from alignment.checkpoint.resume import Checkpoint
from alignment.checkpoint.tensors import TensorFile, write_tensors
from alignment.checkpoint.writer import CheckpointWriter
from alignment.config.errors import CheckpointError

MANIFEST = Manifest("r", 3, "sft", 2, 0, 8, 9, True, {}, {}, {}, {})


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The current rank, the number of ranks, and the messages to the user; there is no process group."""
    found = SimpleNamespace(rank=0, ranks=2, told=[])
    for module in (writer, resume):
        monkeypatch.setattr(module, "together", contextlib.nullcontext)
        monkeypatch.setattr(module, "tell", found.told.append)
        monkeypatch.setattr(module, "rank", lambda: found.rank)
        monkeypatch.setattr(module, "world_size", lambda: found.ranks)
    monkeypatch.setattr(resume, "on_first_rank", lambda call: call())
    return found


class Net(nn.Module):
    """A model with buffers and frozen parameters that its forward pass could change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.trained = nn.Parameter(torch.zeros(2))
        self.frozen, self.same, self.divided = (nn.Parameter(torch.zeros(2), requires_grad=False) for _ in range(3))
        self.divided.ds_id = 0  # type: ignore[attr-defined]
        self.register_buffer("grown", torch.zeros(2))
        self.register_buffer("cast", torch.zeros(2), persistent=False)


def test_frozen_tensors_that_have_changed_are_restored(tmp_path: Path) -> None:
    model = Net()
    frozen = FrozenTensors(model)
    assert frozen.changed == {}
    with torch.no_grad():
        for changed in (model.trained, model.frozen, model.divided, model.inner.running_mean):
            changed.add_(3)  # type: ignore[union-attr]
    model.grown, model.cast = torch.arange(3.0), torch.ones(2, dtype=torch.float64)
    model.inner.register_buffer("later", torch.tensor([5.0]))
    found = frozen.changed
    assert sorted(found) == ["cast", "frozen", "grown", "inner.later", "inner.running_mean"]
    write_tensors(tmp_path / "file", found, {})
    twin = Net()
    kept = (twin.frozen, twin.inner.running_mean)
    FrozenTensors(twin).restore(TensorFile(tmp_path / "file"))
    now = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    assert all(torch.equal(now[name], value) and now[name].dtype == value.dtype for name, value in found.items())
    assert kept[0] is twin.frozen and kept[1] is twin.inner.running_mean and not twin.trained.any()
    assert {"grown", "inner.running_mean"} <= twin.state_dict().keys()
    assert not {"cast", "inner.later"} & twin.state_dict().keys()


def test_what_two_ranks_wrote_is_read_by_one(tmp_path: Path, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, exported = mock.Mock(), {"w": ["model.safetensors", "key"]}
    monkeypatch.setattr(resume, "read_fragments", read)
    monkeypatch.setattr(resume, "group_settings", lambda policy: [])
    monkeypatch.setattr(writer, "write_fragments", lambda *args: {"fragments": FileRecord(1, str(args[2]))})
    engines, known = mock.Mock(), {"sum", "rollout", "rank"}
    state = mock.Mock(unknown=lambda shared, own: sorted({*shared, *own} - known))
    engines.frozen.changed, engines.policy.scheduler = {"a": torch.arange(2.0)}, None
    state.state.side_effect = lambda: ({"sum": np.float64(0.5), "rollout": 1}, {"rank": place.rank})
    state.redistributed = lambda states, rank: [states, rank]
    made = CheckpointWriter(SFTConfig("out"), engines, state, mock.Mock(), MANIFEST, mock.Mock(), mock.Mock())
    files: dict[str, FileRecord] = {}
    for place.rank in (1, 0):
        records = made._write_own(tmp_path, exported)  # type: ignore[arg-type]
        assert records.pop("fragments").checksum == str(exported)
        assert all(record.size == (tmp_path / name).stat().st_size for name, record in records.items())
        files |= records
    assert sorted(files) == [
        *(frozen_file(rank, 2) for rank in (0, 1)), "run_state-00000.json", "run_state-00001.json", "run_state.json"
    ]  # fmt: skip
    place.ranks, two, one = 1, replace(MANIFEST, files=files), replace(MANIFEST, world_size=1)
    resume.restore(Checkpoint(tmp_path, two), engines, state, one)
    read.assert_called_once_with(engines.policy, tmp_path, exported={"w": ("model.safetensors", "key")})
    (restored,) = engines.frozen.restore.call_args.args
    assert restored.path == tmp_path / "frozen-00001-of-00002.safetensors" and restored.metadata == {"format": "pt"}
    state.load.assert_called_once_with({"sum": 0.5}, [[{"rank": 0}, {"rank": 1}], 0])
    assert len(place.told) == 1 and "2 ranks" in place.told[0] and "1 rank:" in place.told[0]
    assert "reseeded" in place.told.pop()
    (tmp_path / "run_state.amended.json").write_text('{"sum": 7}')
    for current, shared, told in ((one, {"sum": 7, "rollout": 1}, 0), (replace(one, stage=3), {"sum": 7}, 1)):
        resume.restore(Checkpoint(tmp_path, one), engines, state, current)
        assert state.load.call_args.args == (shared, {"rank": 0}) and engines.frozen.restore.call_count == 1
        assert len(place.told) == told and "reseeded" not in str(place.told)
    (tmp_path / "run_state.amended.json").write_text('{"newer": 7, "later": 1}')
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: has a state of later, newer, which is unknown"):
        resume.restore(Checkpoint(tmp_path, one), engines, state, one)


def test_if_all_checkpoints_are_damaged_each_reason_is_given(
    tmp_path: Path, place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = mock.Mock(**{"check_contents.side_effect": CheckpointError("5 is torn")})
    monkeypatch.setattr(resume, "check_same_run", mock.Mock())
    monkeypatch.setattr(resume, "find", lambda *args: ([Checkpoint(tmp_path, torn)], ["6 is old"]))
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path} can be .*: 6 is old; 5 is torn. To start"):
        resume.choose(tmp_path, True, MANIFEST, anyway=True)


def test_settings_of_groups_are_restored_in_the_type_of_the_optimizer() -> None:
    made = torch.optim.AdamW([torch.zeros(1)], lr=torch.tensor(0.5), betas=(0.5, 0.75))
    policy: Any = SimpleNamespace(engine=SimpleNamespace(optimizer=made))
    (group,) = made.param_groups
    group["own"], rate = object(), group["lr"]
    (saved,) = group_settings(policy)
    assert saved["lr"] == 0.5 and not {"params", "own"} & saved.keys()
    restore_group_settings(policy, [{**saved, "lr": 0.25, "betas": [0.125, 0.5], "eps": 2.0}])
    assert group["lr"] is rate and float(rate) == 0.25 and group["betas"] == (0.125, 0.5) and group["eps"] == 2.0


def test_what_json_keeps() -> None:
    for value in (None, 1, 2.5, True, "a", (1, [2.0]), [{}], {"a": {"b": 1}}):
        assert _is_plain(value) is True
    for value in ({1}, {1: 2}, {"a": {1, 2}}, {"a": 1, 2: 1}, [1, object()], np.float64(1)):
        assert _is_plain(value) is False
