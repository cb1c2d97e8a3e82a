"""Run ``runs.py`` with interpreted Triton kernels, while the validation of options assumes a GPU."""

from __future__ import annotations

import sys

import interpreting  # noqa: F401 - first
from drivers.runs import main

from alignment.engines.guard import guarded
from alignment.planning import kernels

if __name__ == "__main__":
    kernels.has_gpu = lambda: True
    sys.exit(guarded(main))
