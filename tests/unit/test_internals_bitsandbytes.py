"""What `alignment.internals.bitsandbytes` relies on."""

from __future__ import annotations

import subprocess
import sys

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
importlib.reload(bitsandbytes.backends.cpu.ops)
print("hushed")
from alignment.internals.bitsandbytes import hush_missing_kernel
hush_missing_kernel()
importlib.reload(bitsandbytes.backends.cpu.ops)
"""


def test_the_warning_about_a_missing_kernel() -> None:
    done = subprocess.run(
        [sys.executable, "-uc", CODE], check=True, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    as_it_is, hushed, after = done.stdout.partition("hushed\n")
    warning = "logged: Failed to load CPU gemm_4bit_forward"
    assert hushed and warning in as_it_is and warning not in after
