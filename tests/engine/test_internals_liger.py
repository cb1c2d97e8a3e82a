"""Undocumented behavior of Liger that this project relies on; kernels run in Triton's interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS, ROOT
from transformers import LlamaForCausalLM

from alignment.internals.liger import LOSSES, kernels_by_type, left_out, put_into
from tools.architectures.comparison import types
from tools.architectures.tiny import tiny_model
from tools.ranks.client import environment

# One type of each kind of layer; test_every_type_of_liger has all.
SAMPLE = ("llama", "gemma2")
# Their kernels for experts are tuned when they are first called, which takes a GPU; those of Qwen3.5's mixture are
# refused, because Liger 0.8.5 imports what it does not have. On a GPU: python -m tools.architectures.liger.
NOT_INTERPRETED = {"deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe", "qwen3_next", "hunyuan_v1_moe"}
NOT_INTERPRETED |= {"qwen3_5_moe", "qwen3_5_moe_text"}


def run(out: Path, *names: str) -> dict[str, Any]:
    """The driver's results for these types, from a separate process."""
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
    assert left_out("llama") == frozenset() and left_out("glm4") == {"rope"} and left_out("gpt_oss") == {"swiglu"}


@pytest.mark.slow
def test_kernels_are_applied_to_one_model(tmp_path: Path) -> None:
    """Its layers use them, with the same results; the modeling module keeps its classes."""
    found = run(tmp_path / "out.json", *SAMPLE)
    assert {name: one["classes"] for name, one in found.items()} == dict.fromkeys(SAMPLE, [])
    assert all("apply_rotary_pos_emb" in one["functions"] for one in found.values())
    modules = {name: set(one["modules"]) for name, one in found.items()}
    assert {"LigerRMSNorm", "LigerSwiGLUMLP"} <= modules["llama"]
    assert "LigerGEGLUMLP" in modules["gemma2"]
    assert all(map(same, found.values())), found
    assert all(one["logps"] > 0 for one in found.values()), "a kernel rounds in another way"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(kernels_by_type().keys() & types().keys() - NOT_INTERPRETED))
def test_every_type_of_liger(tmp_path: Path, name: str) -> None:
    assert same(run(tmp_path / "out.json", name)[name])


def test_liger_does_not_change_the_forward_of_a_model_or_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fused loss, and a rotary embedding that still runs without kernels or an interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    file = sys.modules[LlamaForCausalLM.__module__]
    plain, attention = file.apply_rotary_pos_emb, torch.randn(1, 2, 3, 8)
    angles = torch.randn(1, 3, 8)
    expected = plain(attention, attention, angles, angles)
    try:
        model = tiny_model("llama")
        for _ in range(2):  # policy and reference
            put_into(model, {})
        assert "forward" not in vars(model) and file.LlamaForCausalLM.forward is type(model).forward
        assert model.model.norm._get_name() == "LigerRMSNorm" and file.LlamaRMSNorm.__name__ == "LlamaRMSNorm"
        chosen = file.apply_rotary_pos_emb
        assert chosen is not plain and chosen.without_liger is plain
        found = chosen(attention, attention, angles, angles)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    finally:
        file.apply_rotary_pos_emb = plain
