"""Content identifiers of references: they change with the weights, and with nothing else."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.helpers import make_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from alignment.config.errors import ModelError
from alignment.methods.kto_options import KTOConfig
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource, model_source
from alignment.references import content
from alignment.references.content import adapters_content, file_hashes, live_content, source_content

OPTIONS = KTOConfig("out", use_cpu=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that must not be modified."""
    return Path(make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A model that may be modified, whose files are an hour old."""
    path = Path(shutil.copytree(folder, tmp_path / "model"))
    for file in path.iterdir():
        aged(file, 3600)
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of files whose content is read."""
    names: list[str] = []
    real = content.file_hash

    def recorded(file: Path) -> bytes:
        names.append(file.name)
        return real(file)

    monkeypatch.setattr(content, "file_hash", recorded)
    return names


def aged(file: Path, seconds: float) -> None:
    os.utime(file, (time.time() - seconds,) * 2)


def of_path(path: Path, memory: Path, **kwargs: Any) -> dict[str, Any]:
    return source_content(model_source(str(path), "model", OPTIONS, kwargs), memory, keep=True)


def flip(file: Path) -> None:
    """Flip one bit of the last weight without changing the size."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_the_content_includes_weights_configuration_and_code(copied: Path, tmp_path: Path) -> None:
    memory = tmp_path / "hashes.json"
    found = [of_path(copied, memory)]
    changes: list[Callable[[], Any]] = [
        lambda: flip(copied / "model.safetensors"),
        lambda: (copied / "config.json").write_text((copied / "config.json").read_text() + " "),
        lambda: (copied / "modeling.py").write_text("x = 1"),
        lambda: (copied / "adapter_model.safetensors").write_bytes((copied / "model.safetensors").read_bytes()),
    ]
    for change in changes:
        change()
        found.append(of_path(copied, memory))
        assert found[-1] not in found[:-1]
    assert of_path(copied, memory, use_cache=False) not in found, "an argument of from_pretrained may change the model"
    (copied / "tokenizer_config.json").write_text("{}")
    (copied / "log.jsonl").write_text("")
    assert of_path(copied, memory) == found[-1]
    moved = copied.rename(tmp_path / "moved")
    assert of_path(moved, memory) == found[-1], "wherever it lies"


def test_files_are_only_read_again_if_size_or_time_changed(copied: Path, tmp_path: Path, reads: list[str]) -> None:
    memory = tmp_path / "cache" / "hashes.json"
    weights = copied / "model.safetensors"
    first = of_path(copied, memory)
    assert sorted(reads) == ["config.json", "model.safetensors"]
    assert of_path(copied, memory) == first and len(reads) == 2
    aged(weights, 1800)
    assert of_path(copied, memory) == first and reads[2:] == ["model.safetensors"]
    stamp = weights.stat().st_mtime_ns
    weights.write_bytes(weights.read_bytes() + b" ")
    os.utime(weights, ns=(stamp, stamp))
    assert file_hashes([weights], memory)[weights.name] not in str(first) and reads[3:] == ["model.safetensors"]
    for torn in ("", "[]", '{"a": 1}', json.dumps({str(weights.resolve()): [1, 2]})):
        memory.write_text(torn)
        assert set(file_hashes([weights], memory)) == {"model.safetensors"}
    assert len(reads) == 8


def test_the_hash_of_a_recent_file_is_not_cached(copied: Path, tmp_path: Path, reads: list[str]) -> None:
    """It may change again with the same timestamp."""
    memory, weights = tmp_path / "hashes.json", copied / "model.safetensors"
    stamp = time.time_ns()
    os.utime(weights, ns=(stamp, stamp))
    first = of_path(copied, memory)
    flip(weights)
    os.utime(weights, ns=(stamp, stamp))
    assert of_path(copied, memory) != first
    assert reads.count("model.safetensors") == 2 and reads.count("config.json") == 1


def test_a_hub_model_is_identified_by_its_commit(folder: Path, tmp_path: Path) -> None:
    def publish(commit: str) -> None:
        repository = tmp_path / "hub" / "models--some--model"
        shutil.copytree(folder, repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)

    def seen(**kwargs: str) -> dict[str, Any]:
        given = {"cache_dir": str(tmp_path / "hub"), **kwargs}
        source = model_source("some/model", "model", OPTIONS, given)
        return source_content(source, tmp_path / "hashes.json", keep=True)

    publish("1" * 40)
    first = seen()
    assert first["commit"] == "1" * 40 and first["name"] == "some/model" and "files" not in first
    assert seen() == first
    publish("2" * 40)
    assert seen()["commit"] == "2" * 40
    assert seen(revision="1" * 40)["commit"] == "1" * 40
    unknown = ModelSource("some/other", None, model_source(str(folder), "model", OPTIONS).config, {})
    with pytest.raises(ModelError, match="'some/other': its commit is not in the Hub cache"):
        source_content(unknown, tmp_path / "hashes.json", keep=True)


def test_a_live_model_is_identified_by_its_parameters(folder: Path) -> None:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first = live_content(model, keep=True)
    assert live_content(copy.deepcopy(model), keep=True) == first
    assert live_content(model, keep=False) == {}
    found = [first]
    for change in (_one_weight, _one_buffer, _swapped, _turned, _epsilon, lambda other: other.to(torch.bfloat16)):
        other = copy.deepcopy(model)
        change(other)
        found.append(live_content(other, keep=True))
    assert all(one not in found[:number] for number, one in enumerate(found))


@torch.no_grad()
def _one_weight(model: PreTrainedModel) -> None:
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))


def _one_buffer(model: PreTrainedModel) -> None:
    model.get_buffer("model.rotary_emb.inv_freq")[1] *= 2


@torch.no_grad()
def _swapped(model: PreTrainedModel) -> None:
    """The same bytes in another order."""
    one, other = (model.get_parameter(f"model.layers.{layer}.mlp.up_proj.weight") for layer in (0, 1))
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


@torch.no_grad()
def _turned(model: PreTrainedModel) -> None:
    """The same bytes with another shape."""
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    weight.data = weight.reshape(weight.shape[::-1])


def _epsilon(model: PreTrainedModel) -> None:
    model.config.rms_norm_eps = 1e-3


@pytest.mark.parametrize("kind", ["SCB", "quant_state"])
def test_constants_of_packed_weights_are_part_of_the_content(kind: str, folder: Path) -> None:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    weight, found = model.get_parameter("model.norm.weight"), [live_content(model, keep=True)]
    for values in (torch.zeros(2), torch.ones(2)):
        state = SimpleNamespace(as_dict=lambda packed, values=values: {"absmax": values} if packed else {})
        setattr(weight, kind, values if kind == "SCB" else state)
        found.append(live_content(model, keep=True))
        assert found[-1] not in found[:-1] and live_content(model, keep=False) == {}


def test_adapters_are_identified_by_their_files(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(path: str | None) -> dict[str, Any]:
        return adapters_content(Adapters(LoraConfig(), name="own", path=path), tmp_path / "hashes.json")

    (copied / "adapter_config.json").write_text("{}")
    assert of(None) == {"name": "own"}
    assert sorted(of(str(copied))["files"]) == ["adapter_config.json", "config.json", "model.safetensors"]
    monkeypatch.setattr(content, "hub_commit", lambda *given: str(given))
    assert of("a/b") == {"name": "a/b", "commit": str(("a/b", "adapter_config.json", {}))}
