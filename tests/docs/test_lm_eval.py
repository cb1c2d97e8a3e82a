"""The command of docs/guides/export.md for lm_eval, where it is installed."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from support.helpers import make_model
from support.pages.blocks import blocks_of
from support.pages.running import write_file


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("lm_eval") is None, reason="lm_eval is not installed")
def test_lm_eval_reads_an_exported_folder(tmp_path: Path) -> None:
    make_model(tmp_path / "outputs" / "published")
    blocks = blocks_of("docs/guides/export.md")
    for block in blocks:
        if block.file and block.file.startswith("outputs/tasks/"):
            write_file(block, tmp_path)
    (command,) = (block.text for block in blocks if block.text.startswith("lm_eval "))
    done = subprocess.run(
        [*shlex.split(command), "--device", "cpu"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "|colors|" in done.stdout and "|acc " in done.stdout
