"""Weights on their way to a server that follows vLLM's protocol: files, the order of calls, errors, and the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.drivers.rollout import policy_engine
from support.fake_vllm import FakeVLLM, Fault
from support.small_disk import small_disk
from transformers import PreTrainedModel

from alignment.config.errors import OutputError, TrainingError
from alignment.models.adapters.injection import inject
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource, read_config
from alignment.rollout.vllm import weights
from alignment.rollout.vllm.client import Client
from alignment.rollout.vllm.weights import WeightSync
from alignment.run.lock import LOCK

pytestmark = pytest.mark.usefixtures("own_process_group")

LORA = Adapters(LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"], task_type="CAUSAL_LM"), trained=1)


@pytest.fixture
def server(base: str) -> Iterator[FakeVLLM]:
    with FakeVLLM(base).running() as running:
        yield running


@contextlib.contextmanager
def synced(
    server: FakeVLLM, folder: Path | None, adapters: Adapters | None = None, timeout: float = 5.0
) -> Iterator[WeightSync]:
    """What sends the weights of a policy on one rank."""

    def injected(model: PreTrainedModel, ds_config: dict[str, Any]) -> None:
        inject(model, LORA, ds_config=ds_config, dtype=torch.float32, seed=3)

    policy = policy_engine(server.folder, "stage0", adapted=None if adapters is None else injected)
    client = Client(server.url, timeout)
    config = read_config(server.folder, key="model", trust_remote_code=False)
    source = ModelSource(server.folder, None, config, {})
    try:
        sync = WeightSync(client, policy, adapters, source, folder, base_name="base")
        yield sync
        sync.close()
    finally:
        client.close()
        policy.close()


def files(folder: Path) -> list[str]:
    """Names of the files and folders that were written, below the run's own folder."""
    return sorted(str(path.relative_to(folder)).partition("/")[2] for path in folder.glob("*/*") if path.name != LOCK)


def test_a_full_models_files_are_gone_once_they_are_read(server: FakeVLLM, tmp_path: Path) -> None:
    found = {}

    def look(path: str, number: int) -> None:
        found[path] = files(tmp_path)

    server.fault = look
    with synced(server, tmp_path) as sync:
        assert sync.update("run-1") == "base" and files(tmp_path) == []
        assert found["/collective_rpc"] == ["run-1"]
    assert list(tmp_path.iterdir()) == []


def test_an_adapters_files_remain_until_it_is_unloaded(server: FakeVLLM, tmp_path: Path) -> None:
    found = {}

    def look(path: str, number: int) -> None:
        found[path, number] = files(tmp_path)

    server.fault = look
    with synced(server, tmp_path, LORA) as sync:
        assert [sync.update("run-1"), sync.update("run-2")] == ["run-1", "run-2"]
        assert files(tmp_path) == ["run-2"] and list(server.adapters) == ["run-2"]
        assert found["/v1/unload_lora_adapter", 0] == ["run-1", "run-2"]
    assert list(tmp_path.iterdir()) == [] and not server.adapters


def test_a_server_whose_reload_fails_stays_paused(server: FakeVLLM, tmp_path: Path) -> None:
    with synced(server, tmp_path, timeout=1.0) as sync:
        sync.update("run-1")
        server.fault = lambda path, number: Fault(500, "broken") if path == "/collective_rpc" else None
        with pytest.raises(TrainingError, match="vllm_weights_folder"):
            sync.update("run-2")
        assert server.version == "run-1" and server.paths("/pause", "/resume")[-1] == "/pause"
        server.fault = lambda path, number: None
        assert sync.update("run-3") == "base" and server.version == "run-3"
        assert server.paths("/pause", "/resume")[-1] == "/resume"


def test_an_adapter_whose_version_could_not_be_set_is_unloaded_later(server: FakeVLLM, tmp_path: Path) -> None:
    with synced(server, tmp_path, LORA, timeout=1.0) as sync:
        server.fault = lambda path, number: Fault(400) if path == "/update_weight_version" else None
        with pytest.raises(TrainingError):
            sync.update("run-1")
        assert list(server.adapters) == ["run-1"] and files(tmp_path) == ["run-1"]
        server.fault = lambda path, number: None
        sync.update("run-2")
        assert list(server.adapters) == ["run-2"] and files(tmp_path) == ["run-2"]


def test_a_full_disk_is_an_error_before_the_server_is_asked(server: FakeVLLM, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 16) as disk, synced(server, disk) as sync:
        with pytest.raises(OutputError, match="^vllm_weights_folder: .*No space left"):
            sync.update("run-1")
        assert server.paths("/pause", "/collective_rpc") == [] and files(disk) == []


def test_a_folder_that_does_not_exist(server: FakeVLLM, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="^vllm_weights_folder: .*missing"), synced(server, tmp_path / "missing"):
        pass


def test_the_end_does_not_wait_for_a_server_that_is_gone(
    server: FakeVLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_CLOSING_S", 1.0)
    with synced(server, tmp_path, LORA, timeout=600.0) as sync:
        sync.update("run-1")
        server.fault = lambda path, number: Fault()
        began = time.monotonic()
        sync.close()
        assert time.monotonic() - began < 20 and list(tmp_path.iterdir()) == []


def test_files_of_processes_that_were_killed_are_deleted(server: FakeVLLM, tmp_path: Path) -> None:
    kinds = {"killed": 100, "held": 100, "young": 0}
    for name, age in kinds.items():
        folder = tmp_path / f"alignment-vllm-{name}"
        folder.mkdir()
        (folder / LOCK).touch()
        os.utime(folder, (time.time() - age,) * 2)
    (tmp_path / "another").mkdir()
    with (tmp_path / "alignment-vllm-held" / LOCK).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with synced(server, tmp_path):
            left = {path.name.removeprefix("alignment-vllm-") for path in tmp_path.iterdir()}
            assert len(left) == 4 and left > {"held", "young", "another"}
