"""What this project relies on in Liger, which it does not document; kernels run in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import DRIVERS, ROOT

from alignment.internals.liger import LOSSES, kernels_by_type
from tools.architectures.comparison import types
from tools.ranks.client import environment

# One type of each kind of layer; test_every_type_of_liger has all.
SAMPLE = ("llama", "gemma2", "phi3", "qwen3_moe")


def run(out: Path, *names: str) -> dict[str, Any]:
    """What the driver writes about these types; in a process of its own."""
    command = [sys.executable, str(DRIVERS / "liger_types.py"), str(out), *names]
    paths = f"{ROOT}:{ROOT / 'tests'}"
    done = subprocess.run(
        command, env=environment(PYTHONPATH=paths, OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def same(found: dict[str, Any]) -> bool:
    """Equal up to the rounding of fp32."""
    return bool(found["logps"] < 1e-4 and found["gradient"] < 1e-4)


def test_types_and_names_of_kernels() -> None:
    known = kernels_by_type()
    assert {"llama", "qwen2", "qwen3", "gemma2", "mistral", "phi3"} <= known.keys()
    assert known["llama"] == {"rope", "rms_norm", "swiglu", *LOSSES}
    assert "geglu" in known["gemma2"]


@pytest.mark.ci
def test_kernels_are_put_into_one_model(tmp_path: Path) -> None:
    """Its layers compute by them, to the same numbers; the modelling file keeps its classes."""
    found = run(tmp_path / "out.json", *SAMPLE)
    assert {name: one["classes"] for name, one in found.items()} == dict.fromkeys(SAMPLE, [])
    assert all("apply_rotary_pos_emb" in one["functions"] for one in found.values())
    modules = {name: set(one["modules"]) for name, one in found.items()}
    assert {"LigerRMSNorm", "LigerSwiGLUMLP"} <= modules["llama"]
    assert "LigerGEGLUMLP" in modules["gemma2"]
    assert all(map(same, found.values())), found
    assert all(one["logps"] > 0 for one in found.values()), "a kernel rounds in another way"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(kernels_by_type().keys() & types().keys()))
def test_every_type_of_liger(tmp_path: Path, name: str) -> None:
    assert same(run(tmp_path / "out.json", name)[name])
