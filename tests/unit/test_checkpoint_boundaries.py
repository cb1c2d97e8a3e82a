"""Checkpoints and their folder in small tables: who owns it, who sees it, and which rank reads which file."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.checkpoint import owner, probe
from alignment.checkpoint.manifest import FileRecord, Manifest
from alignment.checkpoint.owner import Owner, Standing
from alignment.config.errors import OutputError


@given(sizes=st.lists(st.integers(0, 20), max_size=9), ranks=st.integers(1, 4))
def test_every_file_is_read_by_one_rank_and_the_loads_are_balanced(sizes: list[int], ranks: int) -> None:
    files = {f"file-{number}": FileRecord(size, "") for number, size in enumerate(sizes)}
    shares = Manifest("r", 1, "kto", 1, 0, 8, 9, True, {}, {}, {}, files).shares(ranks)
    assert len(shares) == ranks and sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name].size for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


HERE = replace(Owner.this_process(), cluster="c", job="7", restarts=1)
AWAY = replace(HERE, host="other")


@pytest.mark.parametrize(
    ("holder", "standing"),
    [
        (HERE, Standing.GONE),  # an earlier trainer of this process
        (replace(HERE, start="0"), Standing.GONE),  # its process ID was reused
        (replace(HERE, pid=2**31 - 1), Standing.GONE),
        (replace(AWAY, restarts=0), Standing.GONE),
        (AWAY, Standing.UNKNOWN),
        (replace(AWAY, restarts=2), Standing.UNKNOWN),
        (replace(AWAY, restarts=0, job="8"), Standing.UNKNOWN),
        (replace(AWAY, restarts=0, cluster="d"), Standing.UNKNOWN),
        (replace(HERE, boot="x", restarts=0), Standing.GONE),
        (replace(HERE, space="x", restarts=0), Standing.GONE),
        (replace(HERE, boot="x"), Standing.UNKNOWN),
    ],
)
def test_whether_the_owner_of_a_folder_lives(holder: Owner, standing: Standing) -> None:
    assert holder.standing(HERE) is standing


def test_owners_outside_of_slurm_are_not_of_the_same_job() -> None:
    assert replace(AWAY, job="", restarts=0).standing(replace(HERE, job="")) is Standing.UNKNOWN


def test_the_start_of_a_process_with_and_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        started = owner.process_start(child.pid)
        assert started and replace(HERE, pid=child.pid, start=started).standing(HERE) is Standing.LIVES
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: 100.25 + self.pid)
        assert owner._start_without_proc(child.pid) == f"{100 + child.pid}"
        child.kill()
    assert owner.process_start(child.pid) is None and owner._start_without_proc(child.pid) is None


@pytest.mark.parametrize("changes", [{"pid": 0}, {"pid": 2**31}, {"pid": "1"}, {"restarts": None}, {"pid": True}])
def test_a_lock_with_invalid_values_is_ignored(changes: dict[str, Any]) -> None:
    assert Owner.parsed(HERE.text()) == HERE
    assert Owner.parsed(replace(HERE, **changes).text()) is None


@pytest.mark.parametrize(("appears", "found"), [(0, None), (5, None), (10.5, None), (11, "unseen")])
def test_a_rank_waits_ten_seconds_for_the_file_of_the_first(
    appears: float, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, path = [0.0], tmp_path / "probe"

    def sleep(seconds: float) -> None:
        now[0] += 0.5
        if now[0] >= appears:
            path.write_text("")

    path.write_text("") if not appears else None
    monkeypatch.setattr(probe.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(probe.time, "sleep", sleep)
    assert probe._look(path) == found and os.listdir(tmp_path) == ([] if found else ["probe"])


@pytest.mark.parametrize("missing", ["", "a", "a/b"])
def test_the_check_of_a_folder_leaves_nothing(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that does not exist is not created."""
    written: list[Path] = []
    monkeypatch.setattr(probe, "from_first_rank", lambda value: value)
    monkeypatch.setattr(probe, "gathered", lambda value: [value])
    monkeypatch.setattr(probe, "_write", lambda path, write=probe._write: written.append(path) or write(path))
    probe.check_shared_folder(tmp_path / missing)
    assert [path.parent for path in written] == [tmp_path] and not any(tmp_path.iterdir())
    monkeypatch.setattr(probe, "_write", lambda path: "Read-only file system")
    with pytest.raises(OutputError, match="^output_dir: .* cannot be written on .*: Read-only file system"):
        probe.check_shared_folder(tmp_path / missing)
