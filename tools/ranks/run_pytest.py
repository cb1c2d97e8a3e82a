"""Run pytest in a forked process as in a new one: ``RankServer.run("run_pytest.py", *arguments, nproc=1)``."""

from __future__ import annotations

import os
import sys

import pytest

from tools.ranks.client import LAUNCHER_VARIABLES

if __name__ == "__main__":
    for name in LAUNCHER_VARIABLES:  # pytest is not a rank
        os.environ.pop(name, None)
    sys.exit(pytest.main(sys.argv[1:]))
