"""The log on a full disk, after a crash, and on a resume: whole lines, each once."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.small_disk import full

from alignment.config.errors import OutputError
from alignment.online.completion_log import CompletionLog
from alignment.reporting.log import CompletionTable, JsonlLog
from alignment.reporting.run_view import seconds_of
from alignment.run.durable import is_full


class LimitedFile:
    """An unbuffered file on a disk of a certain size, which writes what still fits; or one that fails on closing."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> LimitedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        if LimitedPath.fails_on_closing:
            raise full(self.file.name)

    def write(self, data: memoryview) -> int:
        room = LimitedPath.space - os.fstat(self.file.fileno()).st_size
        if room <= 0:
            raise full(self.file.name)
        return int(self.file.write(data[: min(room, 7)]))


class LimitedPath(type(Path())):  # type: ignore[misc]
    """A path on that disk."""

    space = 1 << 30
    fails_on_closing = False

    def open(self, mode: str = "r", *args: Any, **options: Any) -> Any:
        opened = super().open(mode, *args, **options)
        return LimitedFile(opened) if mode == "ab" else opened


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> type[LimitedPath]:
    """The class of paths on a disk that a test may fill."""
    for name in ("space", "fails_on_closing"):
        monkeypatch.setattr(LimitedPath, name, getattr(LimitedPath, name))
    return LimitedPath


def records(path: Path) -> list[int]:
    """The numbers of all lines; each is whole."""
    text = path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line)["n"] for line in text.splitlines()]


def write(log: JsonlLog, *numbers: int) -> None:
    for number in numbers:
        log.write({"n": number, "text": "x" * 30})


def test_lines_wait_while_the_disk_is_full(
    tmp_path: Path, disk: type[LimitedPath], capsys: pytest.CaptureFixture[str]
) -> None:
    log = JsonlLog(disk(tmp_path / "log.jsonl"))
    write(log, 1, 2)
    size = (tmp_path / "log.jsonl").stat().st_size
    disk.space = size + 20  # half a line
    write(log, 3, 4)
    assert records(tmp_path / "log.jsonl") == [1, 2], "the half of line 3 that found space is cut off"
    assert capsys.readouterr().out.startswith(f"output_dir: no space left to write {tmp_path}/log.jsonl")
    assert not log.flush()
    state = log.state_dict()
    assert state["bytes"] == size and [json.loads(line)["n"] for line in state["pending"]] == [3, 4]
    with pytest.raises(OutputError, match=r"^output_dir: no space left .*log\.jsonl: 2 lines lost"):
        log.finish()
    disk.space = 1 << 20
    write(log, 5)
    assert records(tmp_path / "log.jsonl") == [1, 2, 3, 4, 5]
    resumed = JsonlLog(tmp_path / "log.jsonl")
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert records(tmp_path / "log.jsonl") == [1, 2]
    write(resumed, 5)
    assert records(tmp_path / "log.jsonl") == [1, 2, 3, 4, 5]
    disk.space = 0
    write(log, 6)
    disk.space = 1 << 20
    log.finish()
    assert records(tmp_path / "log.jsonl") == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_is_found_full_on_closing(tmp_path: Path, disk: type[LimitedPath]) -> None:
    """Network file systems report it there: what had been written may be on the disk, or not."""
    log = JsonlLog(disk(tmp_path / "log.jsonl"))
    write(log, 1)
    disk.fails_on_closing = True
    write(log, 2, 3)
    disk.fails_on_closing = False
    assert records(tmp_path / "log.jsonl") == [1]
    write(log, 4)
    assert records(tmp_path / "log.jsonl") == [1, 2, 3, 4]


def test_a_failed_write_that_cannot_be_cut_off_immediately(
    tmp_path: Path, disk: type[LimitedPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = JsonlLog(disk(tmp_path / "log.jsonl"))
    write(log, 1)
    size = (tmp_path / "log.jsonl").stat().st_size
    disk.fails_on_closing = True
    with monkeypatch.context() as patch:
        patch.setattr(os, "truncate", lambda *_: (_ for _ in ()).throw(full(tmp_path)))
        write(log, 2)
    disk.fails_on_closing = False
    assert log.state_dict() == {"bytes": 2 * size, "pending": []} and records(tmp_path / "log.jsonl") == [1, 2]


def test_a_file_that_someone_moves_or_empties_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = JsonlLog(path)
    write(log, 1)
    path.rename(tmp_path / "before.jsonl")
    write(log, 2)
    assert (records(tmp_path / "before.jsonl"), records(path)) == ([1], [2])
    path.write_text("")
    write(log, 3)
    assert records(path) == [3]


def test_other_errors_end_a_run_at_the_first_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "log.jsonl", tmp_path):
        with pytest.raises(OutputError, match=r"^output_dir: could not write "):
            JsonlLog(path).write({"n": 1})


def test_a_line_that_a_crash_has_torn_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for torn in ("{", '{"n": 2, "text": "' + "x" * 100_000):
        write(JsonlLog(path), 1)
        with path.open("a") as file:
            file.write(torn)
        write(JsonlLog(path), 3)
        assert records(path) == [1, 3]
        path.unlink()
    path.write_text('{"n": 1')
    write(JsonlLog(path), 2)
    assert records(path) == [2]


def test_a_resume_forgets_what_came_after_the_checkpoint(tmp_path: Path, disk: type[LimitedPath]) -> None:
    log = JsonlLog(disk(tmp_path / "log.jsonl"))
    write(log, 1)
    state = log.state_dict()
    write(log, 2)
    disk.space = 0
    write(log, 3)
    disk.space = 1 << 20
    log.load_state_dict(state)
    write(log, 4)
    assert records(tmp_path / "log.jsonl") == [1, 4]


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 5), [1, 2]),
        (lambda path: os.truncate(path, 0), []),
        (lambda path: path.unlink(), []),
        (lambda path: path.write_text('{"n": 1}\n' + "{" + "x" * 500 + "\n"), [1]),
    ],
)
def test_a_file_that_lost_lines_is_continued(
    damage: Any, left: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log.jsonl"
    log = JsonlLog(path)
    write(log, 1, 2, 3)
    state = log.state_dict()
    damage(path)
    resumed = JsonlLog(path)
    resumed.load_state_dict(state)
    (told,) = capsys.readouterr().out.splitlines()
    assert str(path) in told and "from before the checkpoint" in told
    write(resumed, 4)
    assert records(path) == [*left, 4]


def test_nothing_is_said_of_a_file_that_was_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = JsonlLog(tmp_path / "log.jsonl")
    log.load_state_dict(log.state_dict())
    log.finish()
    assert not list(tmp_path.iterdir())
    silent = JsonlLog(None)
    silent.write({"n": 1})
    silent.finish()
    assert silent.state_dict() == {"bytes": 0, "pending": []}
    silent.load_state_dict({"bytes": 100, "pending": ["{}"]})
    assert silent.flush() and not capsys.readouterr().out


def test_the_state_is_on_the_disk_when_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    log = JsonlLog(tmp_path / "log.jsonl")
    write(log, 1)
    monkeypatch.setattr("alignment.reporting.log.sync", lambda path: synced.append(path.name))
    log.state_dict()
    log.finish()
    assert synced == ["log.jsonl"] * 2

    def fails(path: Path) -> None:
        raise full(path)

    monkeypatch.setattr("alignment.reporting.log.sync", fails)
    with pytest.raises(OutputError, match="could not write") as caught:
        log.state_dict()
    assert is_full(caught.value), "a checkpoint that finds no space can be tried again"


def test_tables_of_completions_wait_as_well(tmp_path: Path, disk: type[LimitedPath]) -> None:
    table = CompletionTable(disk(tmp_path / "completions.jsonl"))
    disk.space = 0
    table.write_table(1, [{"n": 1}])
    assert len(CompletionLog(table, 1, 2).state_dict()["table"]["pending"]) == 1
    with pytest.raises(OutputError, match="1 line lost"):
        table.finish()
    disk.space = 1 << 20
    table.finish()
    assert records(tmp_path / "completions.jsonl") == [1]


def test_records_may_say_when_they_were_written(tmp_path: Path) -> None:
    """In UTC and always of the same length, so that the size of a log does not depend on when it was written."""
    before = time.time()
    JsonlLog(tmp_path / "log.jsonl", timed=True).write({"n": 1})
    found = json.loads((tmp_path / "log.jsonl").read_text())["time"]
    assert len(found) == len("2026-11-22T18:20:11.042Z") and before - 0.001 <= seconds_of(found) <= time.time()
