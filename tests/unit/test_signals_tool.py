"""`make signals`: the judge detects differences, its table is complete, and its record continues."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tools.signals.command import End
from tools.signals.judge import Seen, differences, seen
from tools.signals.plan import NEW, OLD, Cell, Expected, read, table
from tools.signals.record import Record, markdown, wanted

CELL = Cell("torchrun", "launcher", "TERM", "kto")
EXPECTED = Expected((1,), (("85",), ("85",)), ("preempted",), ("SIGTERM",), NEW)
SEEN = Seen("torchrun launcher TERM kto", 1, ("85", "85"), 2.0, (), "preempted", "SIGTERM", 10, 11)


def test_the_table_has_every_launcher_signal_and_target() -> None:
    cells = table()
    for launcher, targets in (
        ("deepspeed", ("launcher", "launch.py", "group", "rank0", "rank1")),
        ("torchrun", ("launcher", "group", "rank0", "rank1")),
        ("python", ("launcher",)),
    ):
        for target in targets:
            for signal in ("TERM", "HUP", "USR1", "INT", "KILL"):
                assert Cell(launcher, target, signal, "kto") in cells
        assert Cell(launcher, "folder", "STOP", "kto") in cells
        assert any(cell.launcher == launcher and cell.signal == "INT2" for cell in cells)
        assert any(cell.launcher == launcher and cell.method == "online_dpo" for cell in cells)


def test_a_line_of_the_table() -> None:
    (cell, expected), *_ = read(
        "# a comment\n\ntorchrun rank0 KILL kto 1|2 killed,1 failed|running - old # why\n"
    ).items()
    assert cell == Cell("torchrun", "rank0", "KILL", "kto") and cell.ranks == 2
    assert expected == Expected((1, 2), (("killed",), ("1",)), ("failed", "running"), ("-",), OLD)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("python launcher TERM kto 85 85 preempted SIGTERM", "line 1: 8 columns, expected 9"),
        ("python launcher TERM kto 85 85,85 preempted SIGTERM new", r"line 1: 2 exit statuses for 1 rank"),
        ("python launcher BREAK kto 85 85 preempted SIGTERM new", "line 1: BREAK is not one of TERM, HUP"),
        ("python launcher TERM kto 85 85 preempted SIGTERM yes", "line 1: yes is not one of new, old"),
        ("python launcher TERM kto 85 85 preempted SIGTERM new\n" * 2, "line 2: .* occurs twice"),
    ],
)
def test_an_invalid_line_of_the_table(line: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read(line)


def test_as_expected() -> None:
    assert differences(SEEN, EXPECTED, scheduled=8) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"exit": 0}, "the launcher exited with 0, expected 1"),
        ({"exit": None}, "the launcher exited with None, expected 1"),
        ({"ranks": ("85", "killed")}, "rank 1 exited with killed, expected 85"),
        ({"left": ("python worker.py",)}, "python worker.py: still running"),
        ({"state": "running"}, "the state is running, expected preempted"),
        ({"signal": "-"}, "the signal is -, expected SIGTERM"),
        ({"checkpoint": 8}, "the newest checkpoint is of step 8, but the signal was sent in step 10"),
        ({"checkpoint": 16}, "the newest checkpoint is of step 16, but the signal was sent in step 10"),
    ],
)
def test_not_as_expected(changes: dict[str, object], problem: str) -> None:
    assert differences(dataclasses.replace(SEEN, **changes), EXPECTED, scheduled=8) == [problem]  # type: ignore[arg-type]


def test_a_checkpoint_that_could_not_be_written() -> None:
    expected = dataclasses.replace(EXPECTED, checkpoint=OLD)
    assert differences(SEEN, expected, 8) == ["the newest checkpoint is of step 11, expected 8"]
    assert differences(dataclasses.replace(SEEN, checkpoint=8), expected, 8) == []
    assert differences(dataclasses.replace(SEEN, checkpoint=0), expected, 8) != []


def test_the_observed_result(tmp_path: Path) -> None:
    end = End(1, (85, None), 1.234, ())
    assert seen(CELL, end, tmp_path, 10, 8).state == "-"
    (tmp_path / "status.json").write_text('{"state": "preem')
    assert seen(CELL, end, tmp_path, 10, 8).state == "-"
    (tmp_path / "status.json").write_text(json.dumps({"state": "failed", "signal": None}))
    found = seen(CELL, end, tmp_path, 10, 8)
    assert (found.state, found.signal, found.ranks, found.seconds) == ("failed", "-", ("85", "killed"), 1.2)
    (tmp_path / "status.json").write_text(json.dumps({"state": "stopped", "signal": "SIGINT"}))
    assert seen(CELL, end, tmp_path, 10, 8).signal == "SIGINT"


def test_a_record_continues_with_what_has_not_passed_with_this_code(tmp_path: Path) -> None:
    file = tmp_path / "outputs" / "record.jsonl"
    record = Record(file, "code")
    record.add(SEEN)
    file.write_text(file.read_text() + '{"code": "code", "cell": "torn')
    Record(file, "other code").add(dataclasses.replace(SEEN, cell="deepspeed group INT kto"))
    again = Record(file, "code")
    assert again.cells == {SEEN.cell: SEEN}
    cells = {CELL: EXPECTED, Cell("deepspeed", "group", "INT", "kto"): EXPECTED}
    assert [cell.launcher for cell in wanted(cells, again, "")] == ["deepspeed"]
    assert wanted(cells, again, "TERM") == []
    again.add(dataclasses.replace(SEEN, problems=("the run cannot be resumed",)))
    assert [cell.launcher for cell in wanted(cells, again, "TERM torchrun")] == ["torchrun"]


def test_the_printed_table_ends_with_the_problems() -> None:
    bad = dataclasses.replace(
        SEEN, state="failed", signal="-", resumed=False, problems=("model.safetensors: other bytes",)
    )
    lines = markdown([CELL, Cell("python", "launcher", "TERM", "kto")], {SEEN.cell: bad})
    assert lines[0].startswith("| launcher | to | signal |") and lines[1].startswith("|---|")
    assert "| torchrun | launcher | TERM | kto | 1 | 85, 85 | failed | 11 | 11 | 2.0 | no |" in lines
    assert lines[-1] == "- torchrun launcher TERM kto: model.safetensors: other bytes"
    assert markdown([CELL], {SEEN.cell: SEEN})[2].endswith("| preempted, SIGTERM | 11 | 11 | 2.0 | bitwise |")
