"""Assumptions of `alignment.internals.bitsandbytes`."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from conftest import ROOT

from alignment.internals.bitsandbytes import (
    compute_as_in_training,
    counts_in_32_bits,
    is_paged,
    keep_packing,
    state_buffer,
    stores_8_bits,
)

# The warning comes from CPUs with AVX512-BF16 where the package `kernels` is missing or offline: neither is certain
# here. So the module is imported a second time, as on such a machine, without its kernels being registered again.
CODE = """
import importlib, logging, sys, types
import bitsandbytes, torch
logging.basicConfig(stream=sys.stdout, format="logged: %(message)s")
def unavailable(*arguments, **more):
    raise OSError("offline")
sys.modules["kernels"] = types.SimpleNamespace(get_kernel=unavailable)
import bitsandbytes._ops
bitsandbytes.functional.has_avx512bf16 = lambda: True
bitsandbytes._ops.register_kernel = lambda *arguments: lambda function: function
importlib.reload(bitsandbytes.backends.cpu.ops)
print("hushed")
from alignment.internals.bitsandbytes import hush_missing_kernel
hush_missing_kernel()
importlib.reload(bitsandbytes.backends.cpu.ops)
"""


@pytest.mark.ci
def test_the_warning_about_a_missing_kernel() -> None:
    done = subprocess.run(
        [sys.executable, "-uc", CODE], check=True, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    as_it_is, hushed, after = done.stdout.partition("hushed\n")
    warning = "logged: Failed to load CPU gemm_4bit_forward"
    assert hushed and warning in as_it_is and warning not in after


ROWS = torch.linspace(-1, 1, 2 * 64).reshape(2, 64)


def packed(kept: bool) -> Any:
    """A 4-bit layer, made on a machine that is said to have AVX512-BF16."""
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32).to("cpu")
    if kept:
        keep_packing(layer)
    return layer


@pytest.mark.parametrize("kept", [False, True])
def test_packed_weights_are_not_repacked(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first case they do not; otherwise the workaround would be unnecessary."""
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    layer = packed(kept)
    before, shape = layer.weight.data.clone(), layer.weight.quant_state.shape
    with torch.no_grad(), contextlib.nullcontext() if kept else contextlib.suppress(Exception):
        layer.eval()(ROWS)  # needs a kernel that this machine may lack, if they are repacked
    same = before.shape == layer.weight.data.shape and torch.equal(before, layer.weight.data)
    assert same == kept and layer.weight.quant_state.shape == shape
    if kept:
        rows = ROWS.clone().requires_grad_()
        layer.train()(rows).sum().backward()
        assert rows.grad is not None and float(rows.grad.abs().sum()) > 0


@pytest.mark.parametrize("alike", [False, True])
def test_8_bit_layers_compute_in_evaluation_what_they_do_in_training(alike: bool) -> None:
    """In the first case they do not; otherwise the workaround would be unnecessary."""
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=6.0).to("cpu")
    if alike:
        compute_as_in_training(layer)
    expected = ROWS @ (layer.weight.CB.float() * layer.weight.SCB[:, None] / 127).T
    torch.testing.assert_close(layer.train()(ROWS), expected, rtol=0, atol=1e-5)
    expected = layer.train()(ROWS).detach()
    with torch.no_grad():
        found = layer.eval()(ROWS)
        assert torch.equal(layer.eval()(ROWS), found)
    assert torch.equal(found, expected) == alike
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_buffer_is_allocated_by_the_optimizer(dtype: torch.dtype) -> None:
    """Nothing can be paged on a CPU, which the optimizer reports when it allocates."""
    weight = torch.nn.Parameter(torch.ones(5, 7))
    paged = bitsandbytes.optim.AdamW([weight], is_paged=True)
    with pytest.warns(UserWarning, match="Paged optimizers are not supported on CPU"):
        buffer = state_buffer(paged, weight, dtype)
    plain = state_buffer(torch.optim.AdamW([weight]), weight, dtype)
    for made in (buffer, plain):
        assert torch.equal(made, torch.zeros(5, 7, dtype=dtype)) and made.dtype == dtype and not made.requires_grad


@pytest.mark.parametrize(
    ("optimizer", "options", "paged", "has_8_bits"),
    [
        (bitsandbytes.optim.PagedAdamW8bit, {}, True, True),
        (bitsandbytes.optim.PagedAdamW, {}, True, False),
        (bitsandbytes.optim.AdamW8bit, {}, False, True),
        (bitsandbytes.optim.Lion, {"optim_bits": 8}, False, True),
        (bitsandbytes.optim.AdamW, {}, False, False),
        (torch.optim.AdamW, {}, False, False),
    ],
)
def test_where_states_are_and_their_bits(optimizer: Any, options: Any, paged: bool, has_8_bits: bool) -> None:
    """Sizes of bitsandbytes' tensors are counted in 32 bits: its GPU kernels would receive a negative size."""
    made = optimizer([torch.nn.Parameter(torch.ones(2))], **options)
    assert (is_paged(made), stores_8_bits(made)) == (paged, has_8_bits)
    assert counts_in_32_bits(made) == (optimizer is not torch.optim.AdamW)
    kernels = (Path(bitsandbytes.__file__).parent / "backends" / "cuda" / "ops.py").read_text()
    assert kernels.count("ct.c_int32(g.numel())") >= 2
    assert ctypes.c_int32(2**31).value < 0
