"""What `alignment.internals.bitsandbytes` relies on."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT

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
if "hushed" in sys.argv:
    from alignment.internals.bitsandbytes import hush_missing_kernel
    hush_missing_kernel()
importlib.reload(bitsandbytes.backends.cpu.ops)
"""


@pytest.mark.parametrize(("argument", "warned"), [("as it is", True), ("hushed", False)])
def test_the_warning_about_a_missing_kernel(argument: str, warned: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, argument], check=True, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ("logged: Failed to load CPU gemm_4bit_forward" in done.stdout) == warned
