"""safetensors files in chunks: byte-identical to the library's, with every defect of a header detected."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from alignment.checkpoint import tensors as module
from alignment.checkpoint.records import FileRecord, record_of
from alignment.checkpoint.tensors import TensorFile, file_bytes, write_tensors
from alignment.config.errors import CheckpointError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool]


@pytest.fixture
def content() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {str(dtype): (torch.rand(7, 5, generator=generator) * 9).to(dtype) for dtype in DTYPES}
    return made | {
        "none": torch.empty(0, 3),
        "step": torch.tensor(3.5),
        "turned": torch.rand(4, 6, generator=generator).T,
        "grad": torch.rand(3, generator=generator).requires_grad_(),
    }


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 32)


@pytest.mark.usefixtures("small_chunks")
def test_the_library_reads_what_was_written(content: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    record = write_tensors(path, content, {"who": "me", "what": "ünï"})
    found = load_file(path)
    assert found.keys() == content.keys()
    for name, tensor in content.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"who": "me", "what": "ünï"}
    whole = path.read_bytes()
    assert record == record_of(path) == FileRecord(len(whole), xxhash.xxh3_128(whole).hexdigest())
    assert abs(file_bytes(content.values(), {"who": "me", "what": "ünï"}) - len(whole)) < 300


@pytest.mark.usefixtures("small_chunks")
def test_what_the_library_wrote_is_read(content: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({name: tensor.detach().contiguous() for name, tensor in content.items()}, path, metadata={"a": "b"})
    with TensorFile(path) as file:
        assert set(file.keys()) == set(content) and file.metadata == {"a": "b"} and "step" in file
        for name, tensor in content.items():
            assert (file.shape(name), file.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
            assert torch.equal(file.read(name), tensor)
            target = torch.empty_like(tensor)  # keeps the strides of the transposed one
            file.read_into(name, target)
            assert torch.equal(target, tensor)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.usefixtures("small_chunks")
def test_a_part_is_read_from_its_offset(turned: bool, tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"first": torch.zeros(3), "x": torch.arange(100.0).view(20, 5)}, {})
    with TensorFile(tmp_path / "a") as file:
        target = torch.empty(5, 6).T if turned else torch.empty(6, 5)
        file.read_into("x", target, start=13)
    assert torch.equal(target, torch.arange(13.0, 43.0).view(target.shape))


@pytest.mark.parametrize(
    ("key", "numel", "start", "dtype", "said"),
    [
        ("y", 1, 0, torch.float32, "has no tensor 'y'"),
        ("x", 11, 0, torch.float32, "x has 10 elements, but elements 0 to 11 are required"),
        ("x", 1, 10, torch.float32, "x has 10 elements, but elements 10 to 11 are required"),
        ("x", 1, -1, torch.float32, "but elements -1 to 0"),
        ("x", 1, 0, torch.bfloat16, "x is torch.float32, but torch.bfloat16 is required"),
    ],
)
def test_missing_tensors_and_elements(
    key: str, numel: int, start: int, dtype: torch.dtype, said: str, tmp_path: Path
) -> None:
    write_tensors(tmp_path / "a", {"x": torch.zeros(10)}, {})
    with TensorFile(tmp_path / "a") as file, pytest.raises(CheckpointError, match=said) as caught:
        file.read_into(key, torch.empty(numel, dtype=dtype), start)
    assert str(tmp_path / "a") in str(caught.value)


def file_of(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int = 0, end: int = 8, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "length", "said"),
    [
        ({"x": entry()}, 8, 10**9, "header of 1000000000 bytes does not fit"),
        (b"{", 0, None, "not valid JSON"),
        (b"[" * 100_000, 0, None, "not valid JSON"),
        (b"\xff\xfe", 0, None, "not valid JSON"),
        ([1], 0, None, "not a JSON object"),
        (b'{"x": 1, "x": 2}', 0, None, "duplicate name"),
        ({"__metadata__": {"a": 1}}, 0, None, "metadata does not map names to strings"),
        ({"__metadata__": []}, 0, None, "metadata does not map names to strings"),
        ({"x": 5}, 0, None, "the entry of x does not consist of dtype, shape and data_offsets"),
        ({"x": entry() | {"y": 1}}, 8, None, "the entry of x does not consist of"),
        ({"x": entry(dtype="F99")}, 8, None, "the dtype 'F99' of x is not supported"),
        ({"x": entry(dtype=["F32"])}, 8, None, "of x is not supported"),
        ({"x": entry(shape=(-2,))}, 8, None, "must be non-negative integers"),
        ({"x": entry(shape=(True, 2))}, 8, None, "must be non-negative integers"),
        ({"x": entry(shape="2")}, 8, None, "must be non-negative integers"),
        ({"x": entry(0, 12)}, 12, None, "do not match its shape"),
        ({"x": entry(8, 0)}, 8, None, "do not match its shape"),
        ({"x": entry(4, 12)}, 12, None, r"x starts at byte \d+ instead of"),
        ({"x": entry(), "y": entry(4, 12)}, 12, None, r"y starts at byte \d+ instead of"),
        ({"x": entry(), "y": entry(12, 20)}, 20, None, r"y starts at byte \d+ instead of"),
        ({"x": entry()}, 7, None, r"\d+ bytes instead of"),
        ({"x": entry()}, 9, None, r"\d+ bytes instead of"),
    ],
)
def test_every_defect_of_a_header(header: Any, data: int, length: int | None, said: str, tmp_path: Path) -> None:
    path = file_of(tmp_path / "a", header, b"\0" * data, length)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=said) as caught:
        TensorFile(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == before


def test_truncations_are_detected(content: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_tensors(path, content, {})
    whole = path.read_bytes()
    for length in {*range(0, len(whole), 7), len(whole) - 1}:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            TensorFile(path)


def test_a_file_that_is_truncated_while_it_is_open(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"x": torch.zeros(100)}, {})
    with TensorFile(tmp_path / "a") as file:
        os.truncate(tmp_path / "a", 300)
        with pytest.raises(CheckpointError, match="ends at byte 300"):
            file.read("x")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for read in (TensorFile, record_of):
        with pytest.raises(CheckpointError, match="none: cannot be .*: No such file or directory"):
            read(tmp_path / "none")
        with pytest.raises(CheckpointError, match="cannot be read|cannot be opened"):
            read(tmp_path)


def test_an_unsupported_dtype(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="x: the dtype torch.complex128 cannot be saved"):
        write_tensors(tmp_path / "a", {"x": torch.zeros(2, dtype=torch.complex128)}, {})


def test_a_full_disk_raises_the_systems_error() -> None:
    with pytest.raises(OSError, match="No space left on device"):
        write_tensors(Path("/dev/full"), {"x": torch.zeros(2)}, {})


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.write
    monkeypatch.setattr(module.os, "write", lambda descriptor, view: written(descriptor, view[:100]))
    write_tensors(tmp_path / "a", {"x": torch.arange(1000.0)}, {})
    assert torch.equal(load_file(tmp_path / "a")["x"], torch.arange(1000.0))


def test_no_file_is_entirely_in_memory(tmp_path: Path) -> None:
    """Neither when written nor when read: the address space has no space for a copy of the 256 MiB."""
    tensor = torch.arange(2**26, dtype=torch.float32)
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 160 * 2**20, limits[1]))
    try:
        write_tensors(tmp_path / "a", {"x": tensor}, {})
        with TensorFile(tmp_path / "a") as opened:
            tensor.zero_()
            opened.read_into("x", tensor)
        record_of(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert torch.equal(tensor[-3:], torch.arange(2**26 - 3, 2**26, dtype=torch.float32)) and tensor[1] == 1
