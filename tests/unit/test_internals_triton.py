"""Assumptions of `alignment.internals.triton`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from alignment.internals.triton import recorded_traffic

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for CPU tensors")
def test_reads_and_writes_of_an_interpreted_kernel() -> None:
    """Masked entries are not counted, and nothing is counted outside of the context."""
    from alignment.models.tiles import fused
    from alignment.models.tiles.products import LogitTransform

    logits, targets, lse = torch.zeros(2, 100), torch.zeros(2, dtype=torch.long), torch.zeros(2)
    with recorded_traffic() as traffic:
        fused.differentiate(logits, None, targets, lse, LogitTransform(), torch.bfloat16)
    assert traffic.read == 2 * (4 * 100 + 8 + 4) and traffic.written == 2 * 2 * 100
    fused.differentiate(logits, None, targets, lse, LogitTransform(), torch.bfloat16)
    assert traffic.written == 2 * 2 * 100


# In a process whose Triton is not interpreted; the cache would answer without compiling.
CODE = """
from alignment.internals.triton import compiled_for
from alignment.models.tiles import kernels
flags = dict.fromkeys(("SCALED", "CAPPED", "HAS_BIAS", "STATS"), False) | {"BLOCK": 256}
types = dict.fromkeys(("logits_ptr", "bias_ptr", "out_ptr"), "*fp32") | {"targets_ptr": "*i64"}
types |= dict.fromkeys(("stride", "out_stride", "columns"), "i32") | dict.fromkeys(("scale", "softcap"), "fp32")
signature = {name: types.get(name, "constexpr") for name in kernels.measure.arg_names}
made = compiled_for(80, kernels.measure, signature, flags, 2)
print(".target sm_80" in made["ptx"] and ".reqntid 64" in made["ptx"], len(made["cubin"]) > 1000)
"""


def test_a_kernel_is_compiled_for_an_absent_gpu(tmp_path: Path) -> None:
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120
    )
    if "No module named 'triton.backends.nvidia'" in done.stderr:
        pytest.skip("this build of triton does not compile for NVIDIA cards")
    assert done.stdout == "True True\n", done.stderr
