"""Where extensions are compiled, and the message about a lock that a killed process has left."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from alignment.engines import host
from alignment.engines.host import EXTENSIONS, compiling


def test_a_lock_that_remains_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch waits for this file, of this name, to vanish."""
    from torch.utils import cpp_extension

    monkeypatch.setenv(EXTENSIONS, str(tmp_path))
    monkeypatch.setattr(host, "_TELL_S", 0.2)
    (tmp_path / "own").mkdir()
    assert Path(cpp_extension._get_build_directory("own", False)) == tmp_path / "own"
    (tmp_path / "own" / "lock").touch()
    with compiling():
        pass
    time.sleep(0.4)
    assert capsys.readouterr().err == ""
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with compiling():
            time.sleep(0.6)
        assert (f"{tmp_path / 'own' / 'lock'}: remove this file" in capsys.readouterr().err) == (rank == "0")


@pytest.mark.parametrize(("here", "own"), [("2", False), ("1", True)])
def test_several_hosts_compile_in_separate_folders(here: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXTENSIONS, "")
    monkeypatch.delenv(EXTENSIONS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    with compiling():
        assert (f"/{socket.gethostname()}-" in os.environ.get(EXTENSIONS, "")) == own
    monkeypatch.setenv(EXTENSIONS, "/mine")
    with compiling():
        assert os.environ[EXTENSIONS] == "/mine"
