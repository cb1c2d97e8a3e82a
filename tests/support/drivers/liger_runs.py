"""The runs of ``runs.py`` with Triton's kernels interpreted, and a GPU as far as the checks of options know."""

from __future__ import annotations

import sys

from support import interpreting  # noqa: F401 - first
from support.drivers.runs import main

from alignment.cli.guarded import guarded
from alignment.planning import kernels

if __name__ == "__main__":
    kernels.has_gpu = lambda: True
    sys.exit(guarded(main))
