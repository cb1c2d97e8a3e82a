"""Run scripts, each in a fork of this process, which has imported the libraries, with a time limit and a log."""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets

from alignment.config.errors import AlignmentError, one_line
from alignment.engines.start_up import import_libraries
from tools.trl.scripts.commands import Command, commands, rewritten, scripts

RAN = "ran"


@dataclass(frozen=True)
class Result:
    """The result of a command.

    Attributes:
        command: the command.
        text: ``ran``, or the refusal or error in one line.
        refused: whether this package refused it with an error message.
    """

    command: Command
    text: str
    refused: bool = False

    @property
    def failed(self) -> bool:
        """Whether the command neither ran nor was refused."""
        return self.text != RAN and not self.refused


def chosen(checkouts: Sequence[Path], words: Sequence[str]) -> list[tuple[Path, Command]]:
    """Return the commands of all scripts whose names contain these words, with the script's file."""
    found = [
        (path, command) for checkout in checkouts for path in scripts(checkout) for command in commands(checkout, path)
    ]
    return [(path, command) for path, command in found if all(word in command.name for word in words)]


def run(jobs: Sequence[tuple[Path, Command]], folder: Path, logs: Path, at_once: int, limit: int) -> list[Result]:
    """Run the commands.

    Args:
        jobs: pairs of a script's file and one of its commands.
        folder: folder for the runs' folders, each with a copy of the script.
        logs: folder for the output of each run.
        at_once: number of concurrent runs.
        limit: time limit of each run in seconds.
    """
    import_libraries()
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    waiting, running = list(enumerate(jobs)), dict[int, tuple[int, float]]()
    results: dict[int, Result] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            number, (path, command) = waiting.pop(0)
            log = logs / f"{command.name.replace('/', '_').replace(' ', '_').replace(',', '')}.log"
            running[_start(path, command, folder / str(number), log)] = number, time.monotonic()
        for pid, (number, start) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            late = time.monotonic() - start > limit
            if late and not ended:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if ended or late:
                results[number] = _result(jobs[number][1], folder / str(number), status, late)
                print(f"{results[number].command.name}: {results[number].text}", file=sys.stderr, flush=True)
                del running[pid]
        time.sleep(0.05)
    return [results[number] for number in range(len(jobs))]


def _start(path: Path, command: Command, folder: Path, log: Path) -> int:
    """Fork a process that runs the command in ``folder``."""
    folder.mkdir()
    script = folder / path.name
    script.write_text(rewritten(path.read_text()))
    for name, text in command.files.items():
        (folder / name).write_text(text)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        os.chdir(folder)
        file = os.open(log, os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        _in_child(script, command, folder)
    finally:
        os._exit(1)


def _in_child(script: Path, command: Command, folder: Path) -> None:
    """Run the script and write its result to a file."""
    cache = folder / "datasets"
    shutil.copytree(datasets.config.HF_DATASETS_CACHE, cache)  # data derived from the rows belongs to this run
    datasets.config.HF_DATASETS_CACHE = cache
    print(shlex.join(["python", command.script, *command.arguments]), flush=True)
    sys.argv = [str(script), *command.arguments]
    outcome = f"1{RAN}"
    try:
        runpy.run_path(str(script), run_name="__main__")
        if not (folder / "out").is_dir():
            outcome = "0no model was saved"
    except (AlignmentError, ImportError) as error:
        traceback.print_exc()
        outcome = f"{'1' if isinstance(error, AlignmentError) else '0'}{one_line(error)}"
    except BaseException as error:
        traceback.print_exc()
        outcome = f"0{type(error).__name__}: {one_line(error)}"
    sys.stdout.flush()
    sys.stderr.flush()
    (folder / "outcome").write_text(outcome)
    os._exit(0)


def _result(command: Command, folder: Path, status: int, late: bool) -> Result:
    """Read the result of a process."""
    file = folder / "outcome"
    if late:
        return Result(command, "timed out")
    if not file.exists():
        return Result(command, f"the process exited with status {status}")
    text = file.read_text()
    shutil.rmtree(folder, ignore_errors=True)
    return Result(command, text[1:], refused=text[0] == "1" and text[1:] != RAN)
