"""A step of every method, traced on a CUDA device that computes nothing: all tensors are where a GPU needs them.

Nothing is read back either, as a trace has no values: a micro-batch's work does not make the host wait.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import DRIVERS, ROOT
from fake_cuda import compile_command

pytestmark = pytest.mark.ci
COMPILER = os.environ.get("CXX", "c++")
CASES = {
    *(
        f"{method}/{kind}"
        for method in ("kto", "cpo", "dpo", "online_dpo", "sft", "reward")
        for kind in ("full", "lora", "4-bit")
    ),
    *("kto/full/apo_zero_unpaired", "kto/lora/True", "cpo/full/simpo"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER}, a C++ compiler, is not installed")
    target = tmp_path_factory.mktemp("fake_cuda") / "fake_cuda.so"
    source = ROOT / "tests" / "data" / "fake_cuda.cpp"
    done = subprocess.run(compile_command(source, target, COMPILER), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


def traced(library: Path, folder: Path, *cases: str, **variables: str) -> tuple[dict[str, Any], str]:
    """The driver's results and its output."""
    result = folder / "result.json"
    # Triton's kernels are launched, which cannot be traced; where they are used, the other way is their fallback.
    more = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)]), "ALIGNMENT_HEAD_TILES": "torch"}
    done = subprocess.run(
        [sys.executable, str(DRIVERS / "fake_cuda_steps.py"), str(library), str(result), *cases],
        cwd=folder,
        env={**os.environ, **more, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    return found, done.stderr


def test_a_step_of_every_method_stays_on_its_device(library: Path, tmp_path: Path) -> None:
    found, said = traced(library, tmp_path)
    assert set(found) == CASES
    failed = {case: error for case, error in found.items() if not isinstance(error, int)}
    assert not failed, f"{failed}\n{said[-3000:]}"
    assert all(found[f"{method}/lora"] == found[f"{method}/4-bit"] > 20 for method in ("kto", "cpo", "sft"))


def test_a_tensor_that_stays_on_the_host_is_detected(library: Path, tmp_path: Path) -> None:
    cases = ("kto/full", "online_dpo/4-bit", "reward/lora")
    found, _ = traced(library, tmp_path, *cases, MIXED="1")
    assert set(found) == set(cases)
    assert all("found at least two devices, cuda:0 and cpu" in str(error) for error in found.values()), found
