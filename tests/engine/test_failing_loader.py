"""An error in a data loader worker ends the process: workers ignore SIGTERM, so Python's exit would wait forever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DRIVERS, ROOT
from support.helpers import make_model

from tools.ranks.client import environment


@pytest.mark.ci
@pytest.mark.parametrize(("how", "says"), [("error", "[Errno 5] Input/output error"), ("killed", "DataLoader worker")])
def test_a_script_with_a_failing_worker_ends(how: str, says: str, tmp_path: Path) -> None:
    """The limit is several times what it takes; without the shutdown, nothing ends it."""
    command = [sys.executable, DRIVERS / "failing_loader.py", make_model(tmp_path / "model"), tmp_path / "out", how]
    path = f"{ROOT}:{ROOT / 'tests'}"
    done = subprocess.run(
        command, env=environment(PYTHONPATH=path), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert says in done.stderr.strip().splitlines()[-1]
