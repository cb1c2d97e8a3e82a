"""What an error is called: its line, and whether it is a defect."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment.engines.failures import describe


def test_a_full_disk_is_seen_through_wrapping_and_named_from_the_frame() -> None:
    def save_file(filename: Path) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    try:
        try:
            save_file(Path("out") / "weights.bin")
        except RuntimeError as inner:
            raise TypeError("could not save") from inner
    except TypeError as error:
        line, is_defect = describe(error)
    assert line.startswith(f"{Path('out') / 'weights.bin'} could not be written, the disk is full")
    assert not is_defect


def test_safetensors_and_memory_errors_are_one_line(tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open

    torn = tmp_path / "model.safetensors"
    torn.write_bytes(b"\x10")

    def load(filename: Path) -> None:
        safe_open(filename, framework="pt")

    with pytest.raises(Exception) as caught:
        load(torn)
    line, is_defect = describe(caught.value)
    assert line.startswith(f"{torn} cannot be read or written: ")
    assert not is_defect
    line, is_defect = describe(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert line.startswith("the GPU is out of memory: set a smaller per_device_train_batch_size")
    assert not is_defect
