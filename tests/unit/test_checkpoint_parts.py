"""Parts of a checkpoint without an engine: frozen tensors, files of a rank, another split, and what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from alignment import SFTConfig
from alignment.checkpoint import resume, writer
from alignment.checkpoint.frozen import FrozenTensors, frozen_file
from alignment.checkpoint.manifest import FileRecord, Manifest
from alignment.checkpoint.optimizer_state import _is_plain, _pieces, group_settings, restore_group_settings
from alignment.checkpoint.saving import move_into
from alignment.checkpoint.tensors import TensorFile, write_tensors
from alignment.checkpoint.writer import CheckpointWriter
from alignment.config.errors import CheckpointError
from alignment.internals.deepspeed_state import Piece, Unit

MANIFEST = Manifest("r", 3, "sft", 2, 0, 8, 9, True, {}, {}, {}, {})


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
    assert not any(tensor.requires_grad for tensor in found.values())
    write_tensors(tmp_path / "file", found, {})
    twin = Net()
    kept = (twin.frozen, twin.inner.running_mean)
    FrozenTensors(twin).restore(TensorFile(tmp_path / "file"))
    now = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    assert all(torch.equal(now[name], value) and now[name].dtype == value.dtype for name, value in found.items())
    assert kept[0] is twin.frozen and kept[1] is twin.inner.running_mean and not twin.trained.any()
    assert {"grown", "inner.running_mean"} <= twin.state_dict().keys()
    assert not {"cast", "inner.later"} & twin.state_dict().keys()
    assert frozen_file(0, 12) == "frozen-00001-of-00012.safetensors"


# Writing ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One process without a process group; the messages to the user."""
    told: list[str] = []
    for module in (writer, resume):
        monkeypatch.setattr(module, "together", contextlib.nullcontext)
        monkeypatch.setattr(module, "tell", told.append)
        monkeypatch.setattr(module, "rank", lambda: 0)
        monkeypatch.setattr(module, "world_size", lambda: 1)
    monkeypatch.setattr(resume, "on_first_rank", lambda call: call())
    return told


def written_by(folder: Path, frozen: dict[str, Tensor]) -> CheckpointWriter:
    engines: Any = SimpleNamespace(policy="policy", frozen=SimpleNamespace(changed=frozen))
    run_state: Any = SimpleNamespace(state=lambda: ({"sum": np.float64(0.5)}, {"seed": 7}))
    args = SFTConfig(str(folder), save_total_limit=2)
    state: Any = SimpleNamespace(global_step=3)
    return CheckpointWriter(args, engines, run_state, state, MANIFEST, lambda folder: None, lambda: None)


def test_the_files_of_a_rank(tmp_path: Path, alone: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        writer, "write_fragments", lambda *args: given.append(args) or {"fragments": FileRecord(1, "")}
    )
    made, name = written_by(tmp_path, {"a": torch.arange(2.0)}), "frozen-00001-of-00001.safetensors"
    exported: Any = {"w": ["model.safetensors", "w"]}
    records = made._write_own(tmp_path, exported)
    assert given == [("policy", tmp_path, exported)]
    assert list(records) == ["fragments", name, "run_state.json", "run_state-00000.json"]
    assert all(records[one].size == (tmp_path / one).stat().st_size for one in list(records)[1:])
    assert torch.equal(load_file(tmp_path / name)["a"], torch.arange(2.0))
    assert TensorFile(tmp_path / name).metadata == {"format": "pt"}
    assert json.loads((tmp_path / "run_state.json").read_text()) == {"sum": 0.5, "exported": exported}
    assert json.loads((tmp_path / "run_state-00000.json").read_text()) == {"seed": 7}
    assert name not in written_by(tmp_path, {})._write_own(tmp_path, {})


def test_a_disk_that_fails_is_reported(tmp_path: Path, alone: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        calls.append(args)
        raise OSError("disk\nfull")

    calls: list[Any] = []
    made = written_by(tmp_path, {})
    monkeypatch.setattr(writer, "prune_checkpoints", fails)
    made.prune(tmp_path / "best")
    assert calls == [(tmp_path, 2, tmp_path / "best")]
    assert len(alone) == 1 and alone[0].startswith("save_total_limit: ") and "disk" in alone[0]
    made.finish(fails)
    assert made.failure is not None and "disk" in made.failure and "\n" not in made.failure and len(calls) == 2


def test_a_folder_gives_way_to_a_file_of_its_name(tmp_path: Path) -> None:
    source, target = tmp_path / "new", tmp_path / "old"
    for folder in (source, target / "chat_templates", target / "notes"):
        folder.mkdir(parents=True)
        (folder / "x").write_text(folder.name)
    (source / "chat_templates").write_text("new")
    move_into(source, target)
    files = {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}
    assert files == {"chat_templates": "new", "x": "new", "notes/x": "notes"} and not source.exists()


# The optimizer ------------------------------------------------------------------------------------------------------


def test_settings_of_groups_are_restored_in_the_type_of_the_optimizer() -> None:
    made = torch.optim.AdamW([torch.zeros(1)], lr=torch.tensor(0.5), betas=(0.5, 0.75))
    policy: Any = SimpleNamespace(engine=SimpleNamespace(optimizer=made))
    made.param_groups[0]["own"] = object()
    (saved,) = group_settings(policy)
    assert saved["lr"] == 0.5 and not {"params", "own"} & saved.keys()
    rate = made.param_groups[0]["lr"]
    restore_group_settings(policy, [{**saved, "lr": 0.25, "betas": [0.125, 0.5], "eps": 2.0}])
    (group,) = made.param_groups
    assert group["lr"] is rate and float(rate) == 0.25 and group["betas"] == (0.125, 0.5) and group["eps"] == 2.0
    with pytest.raises(CheckpointError, match="has 2 parameter groups, but the optimizer has 1"):
        restore_group_settings(policy, [saved, saved])


def test_what_json_keeps() -> None:
    for value in (None, 1, 2.5, True, "a", (1, [2.0]), [{}], {"a": {"b": 1}}):
        assert _is_plain(value) is True
    for value in ({1}, {1: 2}, {"a": {1, 2}}, {"a": 1, 2: 1}, [1, object()], np.float64(1)):
        assert _is_plain(value) is False


def test_an_optimizer_with_parameters_of_another_model() -> None:
    own, other = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))
    unit = Unit(torch.zeros(6), 0, (Piece(own, 1, 0, 3), Piece(other, 0, 3, 2)))
    with pytest.raises(CheckpointError, match="parameters that the model does not train"):
        _pieces(unit, {own: "own"})
    assert [tuple(piece) for piece in _pieces(unit, {own: "own", other: "b"})] == [("own", 1, 0, 3), ("b", 0, 3, 2)]


# Resuming -----------------------------------------------------------------------------------------------------------


class State:
    """A run state that knows ``sum`` and ``rollout``, and records what it is given."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def unknown(self, shared: dict[str, Any], own: dict[str, Any]) -> list[str]:
        return sorted({*shared, *own} - {"sum", "rollout", "seed", "rank"})

    def redistributed(self, states: list[Any], rank: int) -> Any:
        return {"states": states, "rank": rank}

    def load(self, shared: Any, own: Any) -> None:
        self.loaded += [shared, own]


@pytest.fixture
def restore(tmp_path: Path, alone: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Restore a checkpoint of two ranks into a run of one; return what the state and the engine were given."""

    def restored(manifest: Manifest, current: Manifest, **further: Any) -> list[Any]:
        given: list[Any] = []
        monkeypatch.setattr(resume, "group_settings", lambda policy: [])
        monkeypatch.setattr(resume, "read_fragments", lambda *args, **more: given.extend((*args, more)))
        shared = {"sum": 1, "rollout": {"batch_size": 2}, "exported": {"w": ["file", "key"]}, **further}
        (tmp_path / "run_state.json").write_text(json.dumps(shared))
        for rank in range(2):
            (tmp_path / f"run_state-{rank:05d}.json").write_text(json.dumps({"rank": rank}))
        state, frozen = State(), SimpleNamespace(restore=lambda file: given.append(file.path.name))
        engines: Any = SimpleNamespace(policy=SimpleNamespace(scheduler=None), frozen=frozen)
        resume.restore(resume.Checkpoint(tmp_path, manifest), engines, state, current)  # type: ignore[arg-type]
        assert given[:2] == [engines.policy, tmp_path]
        return [*given[2:], *state.loaded]

    return restored


def test_a_checkpoint_of_another_split(restore: Callable[..., list[Any]], tmp_path: Path, alone: list[str]) -> None:
    name = frozen_file(0, 2)
    write_tensors(tmp_path / name, {"a": torch.zeros(1)}, {})
    manifest, exported = replace(MANIFEST, files={name: FileRecord(1, "")}), {"exported": {"w": ("file", "key")}}
    (tmp_path / "run_state.amended.json").write_text('{"sum": 5}')
    states = {"states": [{"rank": 0}, {"rank": 1}], "rank": 0}
    assert restore(manifest, replace(MANIFEST, world_size=1)) == [exported, name, {"sum": 5}, states]
    assert len(alone) == 1 and "2 ranks" in alone[0] and "1 rank:" in alone[0] and "reseeded" in alone[0]
    alone.clear()
    found = restore(replace(MANIFEST, world_size=1), replace(MANIFEST, world_size=1))
    assert found == [exported, {"sum": 5, "rollout": {"batch_size": 2}}, {"rank": 0}] and alone == []
    found = restore(replace(MANIFEST, world_size=1), replace(MANIFEST, world_size=1, stage=3))
    assert found == [exported, {"sum": 5}, {"rank": 0}]
    assert len(alone) == 1 and "reseeded" not in alone[0] and "stage 3" in alone[0]


def test_a_checkpoint_with_an_unknown_state(restore: Callable[..., list[Any]], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: has a state of later, newer, which is unknown"):
        restore(MANIFEST, MANIFEST, newer=1, later=2)


def test_if_all_checkpoints_are_damaged_each_reason_is_given(
    tmp_path: Path, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(folder: Path, share: Any) -> None:
        raise CheckpointError(f"{folder} is torn")

    manifest: Any = SimpleNamespace(share=lambda rank, ranks: (rank, ranks), check_contents=check)
    monkeypatch.setattr(resume, "check_same_run", lambda *args, **more: None)
    monkeypatch.setattr(resume, "find", lambda *args: ([resume.Checkpoint(Path("5"), manifest)], ["6 is old"]))
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path} can be .*: 6 is old; 5 is torn. To start"):
        resume.choose(tmp_path, True, MANIFEST, anyway=True)
    monkeypatch.setattr(resume, "find", lambda *args: ([], []))
    assert resume.choose(tmp_path, True, MANIFEST, anyway=True) is None
