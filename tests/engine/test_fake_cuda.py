"""One step of every method on a fake GPU, from loading to the update: all tensors are where a GPU needs them.

The GPU computes on the host (``data/fake_cuda.cpp``), so that a value that is read does not end the trace: every cell
ends with an update. In a micro-batch, the host never waits for the GPU: no value is read, and every copy is from
page-locked memory. In an update it waits twice, for the metrics and for the norm of the gradient. Operations across
two devices are refused, as on a GPU, and so are collectives on tensors in host memory, both ours and DeepSpeed's.
There is one rank: partitioning over ranks is tested on CPUs (``test_split_grid.py``, ``test_adapter_grid.py``,
``test_partitioning.py``).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS, ROOT

COMPILER = os.environ.get("CXX", "c++")
METHODS = ("KTO", "CPO", "DPO", "OnlineDPO", "SFT", "Reward")
FURTHER = (
    *("CPO/lora", "OnlineDPO/lora", "Reward/lora", "KTO/qlora", "DPO/qlora", "SFT/qlora", "OnlineDPO/qlora"),
    *("KTO/stage3", "KTO/reference-offload", "KTO/dora", "CPO/offload", "CPO/optimizer-offload", "DPO/precomputed"),
    *("DPO/reentrant", "DPO/activations", "OnlineDPO/lora-stage3", "SFT/int8", "CPO/tiled"),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER}, a C++ compiler, is not installed")
    target = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so"
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    command = [
        *(COMPILER, "-shared", "-fPIC", "-O0", "-std=c++20", f"-I{torch_folder / 'include'}"),
        *(str(ROOT / "tests" / "data" / "fake_cuda.cpp"), "-o", str(target)),
        *(f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return target


def check(library: Path, folder: Path, *cells: str) -> None:
    result = folder / "result.json"
    # Triton's kernels need a real GPU; where they cannot be used, the other way is their fallback.
    more = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)]), "ALIGNMENT_HEAD_TILES": "torch"}
    more |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # otherwise exchanged over the store, which is a fake
    done = subprocess.run(
        [sys.executable, str(DRIVERS / "fake_cuda_steps.py"), str(library), str(result), *cells],
        cwd=folder,
        env={**os.environ, **more, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    failed = {cell: error for cell, error in found.items() if isinstance(error, str)}
    assert not failed, f"{failed}\n{done.stderr[-3000:]}"
    assert set(found) == set(cells)
    assert {cell: within for cell, (_, within, _) in found.items() if within} == {}
    # Online DPO also exchanges the sizes of a window, and reads its completions.
    most = {cell: 5 if cell.startswith("OnlineDPO") else 2 for cell in found}
    assert {cell: waits for cell, (_, _, waits) in found.items() if len(waits) > most[cell]} == {}
    assert all(math.isfinite(norm) and norm > 0 for norm, *_ in found.values()), found


@pytest.mark.ci
def test_a_step_of_every_method_stays_on_its_device(library: Path, tmp_path: Path) -> None:
    check(library, tmp_path, *(f"{method}/full" for method in METHODS), *FURTHER)
