"""Atomic replacement of files: what a reader, or a restart after a crash, finds."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from support.small_disk import full

from alignment.config.errors import OutputError
from alignment.run.durable import is_full, replace_text, sync, sync_folder, write_json


def kind(descriptor: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name


def test_content_is_synced_before_the_rename_and_the_rename_before_returning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, happened, before = tmp_path / "report.md", [], "old " * 100
    path.write_text(before)
    rename, sync_now = os.replace, os.fsync

    def replace(source: Path, target: Path) -> None:
        assert path.read_text() == before, "readers see the old content until the new content is complete"
        assert source.parent == path.parent and source.read_text() == "größer"
        happened.append("replace")
        rename(source, target)

    def fsync(descriptor: int) -> None:
        happened.append(f"sync {kind(descriptor)}")
        sync_now(descriptor)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "fsync", fsync)
    replace_text(path, "größer")
    assert happened == ["sync .report.md.partial", "replace", f"sync {tmp_path.name}"]
    assert path.read_text(encoding="utf-8") == "größer" and list(tmp_path.iterdir()) == [path]
    sync(path)
    sync_folder(tmp_path)
    assert happened[3:] == ["sync report.md", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_file_unchanged(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise full(tmp_path)

    path = tmp_path / "options.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr(os, step, fails)
    with pytest.raises(OutputError, match=r"^output_dir: .*options\.json") as caught:
        write_json(path, {"a": 2})
    assert is_full(caught.value) and path.read_text() == '{\n  "a": 1\n}\n' and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_recognized_as_the_cause_of_other_errors(tmp_path: Path) -> None:
    quota, error = OSError(errno.EDQUOT, "Disk quota exceeded"), OutputError("output_dir: …")
    error.__cause__ = quota
    assert is_full(error) and is_full(full(tmp_path)) and is_full(quota)
    assert not is_full(OSError(errno.EROFS, "")) and not is_full(OutputError("full")) and not is_full(None)
