"""One message, and all ranks exit: the guard in this process, and on two ranks, forked and with both launchers."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import DRIVERS

from alignment.cli.guarded import guarded
from alignment.config.errors import AlignmentError, OptionError
from alignment.run.activity import ACTIVITY
from alignment.run.ranks import VARIABLES
from tools.ranks import RankServer

DRIVER = DRIVERS / "failing_rank.py"
ADVICE = "free some space, or set output_dir to a folder on another disk"
DISK_FULL = f"could not be written because the disk is full; {ADVICE}"
DEFECT = "(this is a bug; please report it with the traceback)"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def raising(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OptionError("beta=0: set beta > 0"), 1, "error: beta=0: set beta > 0"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "rows.jsonl"), 1,
         "error: rows.jsonl: No such file or directory"),
        (OSError(errno.ENOSPC, "No space left on device", "out/model.safetensors"), 1,
         f"error: out/model.safetensors {DISK_FULL}"),
        (KeyboardInterrupt(), 130, "error: interrupted by the user"),
        (SystemExit("no recipe"), 1, "error: no recipe"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(error)) == code
    assert capsys.readouterr().err == line + "\n"


def test_a_bug_has_a_traceback_followed_by_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(KeyError("lm_head"))) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == f"error: KeyError: 'lm_head' {DEFECT}"


def test_success_help_and_silent_exits(capsys: pytest.CaptureFixture[str]) -> None:
    inside: list[bool] = []
    assert guarded(lambda: inside.append(ACTIVITY.guarded)) == 0
    assert inside == [True] and ACTIVITY.guarded is False
    assert guarded(raising(SystemExit(0))) == 0
    assert guarded(raising(SystemExit(3))) == 3
    assert guarded(raising(SystemExit(256))) == 1, "of which a process would keep 0"
    assert capsys.readouterr().err == ""


def test_an_exit_within_a_run_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        ACTIVITY.folder = tmp_path
        sys.exit(0)

    assert guarded(main) == 1
    assert capsys.readouterr().err == "error: exited with status 0\n"


def test_an_open_progress_bar_does_not_share_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm.auto import tqdm

    bar = tqdm(total=4, file=sys.stderr)
    bar.update(1)
    assert guarded(raising(AlignmentError("loss is nan"))) == 1
    bar.refresh()
    del bar
    assert capsys.readouterr().err.splitlines()[-1] == "error: loss is nan"


def error_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "error:" in line]


IN_PLACE = "rank 1 in phase start, step 0"
FAILURES = [
    ("data", "sleep", "error: rank 1: train.jsonl, line 3: 'label' is 'yes': set true or false"),
    ("defect", "collective", f"error: {IN_PLACE}: RuntimeError: tensor shapes differ {DEFECT}"),
    ("disk", "collective", f"error: {IN_PLACE}: /full/model.safetensors {DISK_FULL}"),
]


def check_failure(stdout: str, stderr: str, kind: str, line: str) -> None:
    """Check that both ranks started, that one line names the error, and that only a bug has a traceback."""
    assert error_lines(stderr) == [line]
    assert stdout.count("began") == 2
    assert ("Traceback" in stderr.partition(line)[0]) == (kind == "defect")


@pytest.mark.parametrize(
    ("kind", "work", "line"), [FAILURES[0], *(pytest.param(*case, marks=pytest.mark.ci) for case in FAILURES[1:])]
)
def test_rank_1_fails_and_both_ranks_exit_with_one_message(ranks: RankServer, kind: str, work: str, line: str) -> None:
    """Without a launcher, which would stop the other rank."""
    done = ranks.run(DRIVER, kind, work, timeout=60, check=False)
    assert [rank.code for rank in done.ranks] == [1, 1]
    check_failure(done.stdout, done.stderr, kind, line)


@pytest.mark.ci
def test_a_rank_that_was_killed_is_the_reason_although_its_launcher_signals(ranks: RankServer) -> None:
    done = ranks.run(DRIVER, "killed", "sleep", timeout=60, check=False)
    assert [rank.code for rank in done.ranks] == [1, -9]
    assert "rank 1 " in error_lines(done.stderr)[0] and "was killed" in done.stderr


@pytest.mark.parametrize(("kind", "code"), [("data", 1), ("interrupted", 130)])
def test_if_both_ranks_fail_only_one_reports(ranks: RankServer, kind: str, code: int) -> None:
    done = ranks.run(DRIVER, f"everyone-{kind}", "sleep", timeout=60, check=False)
    assert [rank.code for rank in done.ranks] == [code, code]
    assert len(error_lines(done.stderr)) == 1


@pytest.mark.ci
def test_ranks_that_finish_at_different_times_succeed_and_exit_hooks_are_not_cut_off(ranks: RankServer) -> None:
    """A tracker may upload for minutes."""
    done = ranks.run(DRIVER, "none", "uneven", timeout=60)
    assert done.stderr == "" and done.stdout.count("has uploaded") == 2


@pytest.mark.faults
@pytest.mark.parametrize(("launcher", "number"), [("deepspeed", 1), ("torchrun", 2)])
def test_rank_1_fails_under_a_launcher(
    launch: Callable[..., subprocess.CompletedProcess[str]], launcher: str, number: int
) -> None:
    kind, work, line = FAILURES[number]
    done = launch(DRIVER, kind, work, nproc=2, launcher=launcher, timeout=60)
    assert done.returncode == 1, done.stderr
    check_failure(done.stdout, done.stderr, kind, line)
    if launcher == "deepspeed":  # torchrun adds its own report
        assert [said for said in done.stderr.splitlines() if said != "still sleeping"][-1] == line
