"""Which evaluation is the best, which checkpoints are kept, which rank reads which file, and files of tensors."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from alignment.checkpoint import tensors as module
from alignment.checkpoint.folder import prune_checkpoints
from alignment.checkpoint.manifest import FileRecord, Manifest, record_of
from alignment.checkpoint.tensors import TensorFile, write_tensors
from alignment.config.errors import CheckpointError


@pytest.mark.parametrize("best", ["out", "link"])
def test_the_best_checkpoint_is_kept_however_its_path_is_spelled(
    tmp_path: Path, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume may name the folder differently from the run that found the best: relative, or through a link."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2, 3, 4):
        (tmp_path / "out" / f"checkpoint-{step}").mkdir(parents=True)
    (tmp_path / "link").symlink_to("out")
    prune_checkpoints(tmp_path / "out", 2, Path(best, "checkpoint-1"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-1", "checkpoint-4"]


@given(sizes=st.lists(st.integers(0, 20), max_size=9), ranks=st.integers(1, 4))
def test_every_file_is_read_by_one_rank_and_the_loads_are_balanced(sizes: list[int], ranks: int) -> None:
    files = {f"file-{number}": FileRecord(size, "") for number, size in enumerate(sizes)}
    manifest = Manifest("r", 1, "kto", 1, 0, 8, 9, True, {}, {}, {}, files)
    shares = [manifest.share(rank, ranks) for rank in range(ranks)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name].size for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


# Files of tensors, which are read and written in chunks --------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool]


@pytest.fixture
def content(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Tensors of several chunks each."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 32)
    generator = torch.Generator().manual_seed(0)
    made = {str(dtype): (torch.rand(7, 5, generator=generator) * 9).to(dtype) for dtype in DTYPES}
    return made | {
        "none": torch.empty(0, 3),
        "step": torch.tensor(3.5),
        "turned": torch.rand(4, 6, generator=generator).T,
        "grad": torch.rand(3, generator=generator).requires_grad_(),
    }


def test_the_library_reads_what_was_written(content: dict[str, Tensor], tmp_path: Path) -> None:
    path, metadata = tmp_path / "a.safetensors", {"who": "me", "what": "ünï"}
    record = write_tensors(path, content, metadata)
    whole, found, file = path.read_bytes(), load_file(path), TensorFile(path)
    assert file.metadata == metadata and found.keys() == content.keys() == file.keys
    for name, tensor in content.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert record == record_of(path) == FileRecord(len(whole), xxhash.xxh3_128(whole).hexdigest())


def test_a_part_is_read_from_its_offset(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"first": torch.zeros(3), "x": torch.arange(100.0).view(20, 5)}, {})
    target = torch.empty(5, 6).T
    TensorFile(tmp_path / "a").read_into("x", target, start=13)
    assert torch.equal(target, torch.arange(13.0, 43.0).view(6, 5))


@pytest.mark.parametrize(
    ("key", "numel", "start", "dtype"),
    [
        ("y", 1, 0, torch.float32),
        ("x", 11, 0, torch.float32),
        ("x", 1, 10, torch.float32),
        ("x", 1, -1, torch.float32),
        ("x", 1, 0, torch.bfloat16),
    ],
)
def test_missing_tensors_and_elements(key: str, numel: int, start: int, dtype: torch.dtype, tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"w": torch.zeros(10), "x": torch.zeros(10), "z": torch.zeros(10)}, {})
    with pytest.raises(CheckpointError, match=f"^{tmp_path / 'a'}: .*{key}"):
        TensorFile(tmp_path / "a").read_into(key, torch.empty(numel, dtype=dtype), start)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    write_tensors(tmp_path / "cut off", {"x": torch.zeros(9)}, {})
    os.truncate(tmp_path / "cut off", 90)
    for read, path in ((TensorFile, tmp_path / "none"), (record_of, tmp_path), (TensorFile, tmp_path / "cut off")):
        with pytest.raises(CheckpointError, match=f"^{path}: "):
            read(path)
    with pytest.raises(CheckpointError, match="^x: .*complex128"):
        write_tensors(tmp_path / "a", {"x": torch.zeros(2, dtype=torch.complex128)}, {})
    with pytest.raises(OSError, match="No space left on device"):
        write_tensors(Path("/dev/full"), {"x": torch.zeros(2)}, {})


def test_no_file_is_entirely_in_memory(tmp_path: Path) -> None:
    """The address space has no space for a copy of the 256 MiB."""
    tensor = torch.arange(2**26, dtype=torch.float32)
    write_tensors(tmp_path / "a", {"x": torch.zeros(1)}, {})  # allocates what the first call needs
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + 160 * 2**20, limits[1]))
        write_tensors(tmp_path / "a", {"x": tensor}, {})
        record_of(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
