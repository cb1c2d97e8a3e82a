"""The store of a reference's log-probs, in which damage never leads to wrong values, and a reference's identifier."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from support.helpers import make_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from alignment.config.errors import ModelError, OptionError, OutputError
from alignment.data.batching import Batch, collate
from alignment.methods.kto_options import KTOConfig
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource, model_source
from alignment.references import content
from alignment.references import store as module
from alignment.references.base import RowIds
from alignment.references.content import adapters_content, file_hashes, live_content, source_content
from alignment.references.precomputed import LogpTable, PrecomputedReference, places
from alignment.references.store import Logps, LogpStore

KEY = {"rows": "a", "partners": 3, "adapters": None, "model": {"files": {"model.safetensors": "b"}}}
ROWS = 10
PARTNERS = np.roll(np.arange(ROWS, dtype=np.int64), 3)
LOGPS = np.random.default_rng(0).normal(-50, 20, (ROWS, 2)).astype(np.float32)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three full parts and one with a single row."""
    monkeypatch.setattr(module, "PART_ROWS", 3)


def opened(folder: Path, key: Any = KEY, partners: Any = PARTNERS) -> tuple[LogpStore, list[str]]:
    store = LogpStore(folder, key, partners, 2)
    return store, store.read()


def filled(folder: Path, key: Any = KEY, logps: Logps = LOGPS, partners: Any = PARTNERS) -> LogpStore:
    store, _ = opened(folder, key, partners)
    store.prepare()
    for part in list(store.missing):
        store.write(part, logps[part.start : part.stop])
    return store


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/part-*"))


def test_values_are_read_back_bitwise(tmp_path: Path) -> None:
    odd = LOGPS.copy()
    odd[:5, 0] = -np.inf, np.nan, -0.0, 1e-45, -3.4e38
    filled(tmp_path, logps=odd)
    store, faults = opened(tmp_path)
    assert faults == [] and store.missing == []
    assert store.values.tobytes() == odd.tobytes()
    assert [(p.start, p.stop) for p in store.parts] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert store.size == sum(file.stat().st_size for file in files(tmp_path))
    assert not list(store.folder.glob(".*")), "no file under a hidden name is left"


def test_an_interrupted_store_reports_missing_parts(tmp_path: Path) -> None:
    store, _ = opened(tmp_path)
    store.prepare()
    for part in (store.parts[2], store.parts[0]):
        store.write(part, LOGPS[part.start : part.stop])
    again, faults = opened(tmp_path)
    assert faults == [] and again.missing == [store.parts[1], store.parts[3]] == store.missing
    assert np.array_equal(again.values[6:9], LOGPS[6:9]) and np.array_equal(again.values[:3], LOGPS[:3])


def test_a_flipped_bit_never_gives_wrong_values(tmp_path: Path) -> None:
    """For every byte of a part: the part is reported as missing, or the values are correct."""
    filled(tmp_path)
    file = files(tmp_path)[1]
    good = file.read_bytes()
    seen = 0
    for place in range(len(good)):
        torn = bytearray(good)
        torn[place] ^= 1 << place % 8
        file.write_bytes(torn)
        store, faults = opened(tmp_path)
        if store.missing:
            assert store.missing == [range(3, 6)] and len(faults) == 1
            assert str(file) in faults[0] and "rows 4 to 6 are recomputed" in faults[0]
            seen += 1
        else:
            assert store.values.tobytes() == LOGPS.tobytes()
    assert seen > 0.9 * len(good)


@pytest.mark.parametrize("kept", [0, 1, 8, 100, -1])
def test_a_truncated_part_is_reported(kept: int, tmp_path: Path) -> None:
    filled(tmp_path)
    file = files(tmp_path)[-1]
    file.write_bytes(file.read_bytes()[:kept])
    store, faults = opened(tmp_path)
    assert store.missing == [range(9, 10)] and len(faults) == 1 and str(file) in faults[0]
    store.prepare()
    assert len(files(tmp_path)) == 3, "what cannot be used is removed"


@pytest.mark.parametrize("partners", [PARTNERS, np.full(ROWS, -1)], ids=["partners", "none"])
def test_a_part_of_another_range_or_store_is_not_used(partners: Any, tmp_path: Path) -> None:
    filled(tmp_path, partners=partners)
    first, second, *_ = files(tmp_path)
    shutil.copy(first, second)
    assert opened(tmp_path, partners=partners)[0].missing == [range(3, 6)]
    filled(tmp_path / "other", {**KEY, "rows": "other"}, partners=partners)
    shutil.copy(files(tmp_path / "other")[1], second)
    assert opened(tmp_path, partners=partners)[0].missing == [range(3, 6)]


def test_a_part_with_other_partners_is_not_used(tmp_path: Path) -> None:
    """In case the same seed ever draws other partners."""
    filled(tmp_path)
    assert opened(tmp_path, partners=np.where(np.arange(ROWS) == 4, 0, PARTNERS))[0].missing == [range(3, 6)]


@pytest.mark.parametrize("text", ["", "{", '{"key": {}}', None])
def test_a_store_without_manifest_is_not_used(text: str | None, tmp_path: Path) -> None:
    store = filled(tmp_path)
    manifest = store.folder / "manifest.json"
    assert '"partners": 3' in manifest.read_text() and '"model.safetensors": "b"' in manifest.read_text()
    manifest.unlink() if text is None else manifest.write_text(text)
    again, faults = opened(tmp_path)
    assert again.missing == again.parts and len(faults) == 1 and str(manifest) in faults[0]
    again.prepare()
    assert files(tmp_path) == []
    assert opened(tmp_path)[1] == []


DIFFERENT: list[dict[str, Any]] = [{"rows": "c"}, {"partners": 4}, {"adapters": "lora"}, {"more": None}]


@pytest.mark.parametrize("different", [*DIFFERENT, {"model": {"files": {"model.safetensors": "d"}}}])
def test_another_key_is_another_store(different: dict[str, Any], tmp_path: Path) -> None:
    mine, key = filled(tmp_path), KEY | different
    other, faults = opened(tmp_path, key)
    assert other.folder != mine.folder and other.missing == other.parts and faults == []
    filled(tmp_path, key, LOGPS + 1)
    assert np.array_equal(opened(tmp_path)[0].values, LOGPS), "both are kept"


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store, faults = opened(tmp_path / "file")
    assert faults == [] and store.missing == store.parts
    with pytest.raises(OutputError, match=f"{tmp_path}/file/.*: .* could not be written: Not a directory; set HF_"):
        store.prepare()


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failed_write_leaves_the_part_missing(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = opened(tmp_path)
    store.prepare()

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        if call == "write":
            patched.setattr(Path, "open", full)
        else:
            patched.setattr(os, call, full)
        with pytest.raises(OutputError, match=r"could not be written: No space left on device; set HF_DATASETS_CACHE"):
            store.write(store.parts[0], LOGPS[:3])
    assert files(tmp_path) == [] and not list(store.folder.glob(".part*"))
    assert store.missing == store.parts


def test_hidden_files_of_a_killed_run_are_removed_after_a_day(tmp_path: Path) -> None:
    store, _ = opened(tmp_path)
    store.prepare()
    old, new = (store.folder / f".part-{name}" for name in ("old", "new"))
    for file in (old, new):
        file.write_bytes(b"half of a par")
    os.utime(old, (time.time() - 90_000,) * 2)
    os.utime(new, (time.time() - 80_000,) * 2)
    store.prepare()
    assert not old.exists() and new.exists(), "another run may be writing the new one"
    assert opened(tmp_path) and opened(tmp_path)[1] == []


# The reference that uses it -----------------------------------------------------------------------------------------


def a_batch(sequences: int) -> Batch:
    return collate([([1], [2])] * sequences, sequences)


def test_sequences_are_looked_up_by_row_and_position() -> None:
    reference = PrecomputedReference({"a": LogpTable(torch.from_numpy(LOGPS), PARTNERS)}, 1)
    ids = RowIds("a", (7, 2, 4), (int(PARTNERS[7]), -1, int(PARTNERS[4])))
    expected = [LOGPS[7, 0], LOGPS[2, 0], LOGPS[4, 0], LOGPS[7, 1], LOGPS[4, 1]]
    assert reference.sequence_logps(a_batch(5), ids).tolist() == expected
    assert reference.sequence_logps(a_batch(0), RowIds("a", (), ())).tolist() == []
    pairs = PrecomputedReference({"a": LogpTable(torch.from_numpy(LOGPS), PARTNERS)}, 2)
    expected = [LOGPS[7, 0], LOGPS[2, 0], LOGPS[7, 1], LOGPS[2, 1]]
    assert pairs.sequence_logps(a_batch(4), RowIds("a", (7, 2))).tolist() == expected
    rows, columns = places(RowIds("a", (7, 2), (5, -1)), 2)
    assert (rows.tolist(), columns.tolist()) == ([7, 2, 7, 2, 7], [0, 0, 1, 1, 2])


def test_missing_log_probs_raise_an_error() -> None:
    reference = PrecomputedReference({"a": LogpTable(torch.from_numpy(LOGPS), PARTNERS)}, 1)
    other = (int(PARTNERS[7]) + 1) % ROWS
    with pytest.raises(RuntimeError, match=f"row 7 has partner {other}, .* for partner {PARTNERS[7]}"):
        reference.sequence_logps(a_batch(2), RowIds("a", (7,), (other,)))
    with pytest.raises(RuntimeError, match="for the dataset 'b'"):
        reference.sequence_logps(a_batch(1), RowIds("b", (7,)))
    with pytest.raises(RuntimeError, match="the batch has 2 sequences, but 1 are stored"):
        reference.sequence_logps(a_batch(2), RowIds("a", (7,)))
    with pytest.raises(OptionError, match="needs the log-prob of each token"):
        reference.token_logps(a_batch(1), RowIds("a", (7,)))
    reference.close()
    with pytest.raises(RuntimeError):
        reference.sequence_logps(a_batch(1), RowIds("a", (7,)))


# Content identifiers of references: they change with the weights, and with nothing else ------------------------------

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
