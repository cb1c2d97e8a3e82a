"""Run a page's blocks from top to bottom in one temporary folder, as a reader would in one terminal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from support.pages.blocks import ROOT, Block
from support.pages.checks import console
from support.pages.output import difference
from tools.ranks.client import environment

_VISIBLE = ("launch", "ds_configs", "examples")
_STATE = ".shell"  # variables and working directory of the reader's shell between two blocks
_TAIL = 6000
# One interpreter runs the page's Python blocks: names defined in a block exist in the following ones.
_DRIVER = """\
import os, sys, traceback
pipe, output = sys.argv[1:]
descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(descriptor, 1)
os.dup2(descriptor, 2)
sys.argv[:] = [""]
names = {"__name__": "__main__"}
for path in open(pipe):
    path = path.rstrip("\\n")
    code = 0
    try:
        exec(compile(open(path).read(), path, "exec"), names)
    except SystemExit as error:
        code = int(bool(error.code))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    with open(path + ".done", "w") as done:
        done.write(str(code))
    os.rename(path + ".done", path + ".code")
"""


class BlockFailed(Exception):
    """A block did not behave as the page says. The message contains the page, the line and the end of the output."""


def make_folder(folder: Path, tiny: str | Path) -> Path:
    """Create a working directory like a checkout: commands, DeepSpeed files, examples and a model in outputs/tiny."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _VISIBLE:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(tiny, folder / "outputs" / "tiny")
    return folder


def write_file(block: Block, folder: Path) -> None:
    """Write a block to the file that its marker names."""
    path = folder / str(block.file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, encoding="utf-8")


class PageRun:
    """A reader's terminal and interpreter.

    Args:
        folder: the working directory, created by :func:`make_folder`.
        timeout: seconds for each block.
        path: folders that are searched for commands before those of this environment.
        python: the command that runs a Python script.
    """

    def __init__(
        self,
        folder: Path,
        timeout: float = 300,
        path: Iterable[str | Path] = (),
        python: Sequence[str] = (sys.executable,),
    ) -> None:
        self.folder, self.timeout = folder, timeout
        commands = [*map(str, path), str(Path(sys.executable).parent), os.environ["PATH"]]
        self._environment = environment(
            PATH=os.pathsep.join(commands),
            PYTHONPATH=str(ROOT),
            OMP_NUM_THREADS="1",
            COLUMNS="120",
            PYTHONUNBUFFERED="1",
        )
        # The tests set these for themselves; a reader does not.
        for name in ("TRITON_INTERPRET", "PYTEST_CURRENT_TEST", "HF_DATASETS_CACHE"):
            self._environment.pop(name, None)
        self._environment["HF_DATASETS_CACHE"] = str(folder.parent / f"{folder.name}-cache")
        self._state = folder.parent / f"{folder.name}{_STATE}"
        self._command, self._pipe = python, -1
        self._python: subprocess.Popen[bytes] | None = None
        self._python_output = folder.parent / f"{folder.name}.python"
        self._pieces = 0

    def close(self) -> None:
        """Stop the interpreter."""
        if self._python is not None:
            os.close(self._pipe)
            try:
                self._python.wait(20)
            except subprocess.TimeoutExpired:
                _kill(self._python)
            self._python = None

    def _interpreter(self) -> subprocess.Popen[bytes]:
        """The process that runs the page's Python, started by the first block."""
        if self._python is None:
            driver, pipe = (self.folder.parent / f"{self.folder.name}-driver{end}" for end in (".py", ".pipe"))
            driver.write_text(_DRIVER)
            os.mkfifo(pipe)
            self._python_output.touch()
            self._python = subprocess.Popen(
                [*self._command, str(driver), str(pipe), str(self._python_output)],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._pipe = os.open(pipe, os.O_RDWR)  # does not wait for the reader
        return self._python

    def run(self, block: Block) -> None:
        """Run a block, or write it to its file.

        Raises:
            BlockFailed: a command failed, or its output differs from the page.
        """
        if block.file:
            write_file(block, self.folder)
        elif block.runs and block.language == "bash":
            self._bash(block, block.text)
        elif block.runs and block.language == "console":
            self._console(block)
        elif block.runs and block.language == "python":
            self._run_python(block)

    def _console(self, block: Block) -> None:
        for command, expected in console(block):
            failing = "error" in expected.lower() or "Traceback" in expected
            printed = self._bash(block, command, may_fail=failing)
            fault = difference(expected, printed)
            if fault:
                raise BlockFailed(f"{block.name}: $ {command}\n{fault}\n--- printed ---\n{printed[-_TAIL:]}")

    def _bash(self, block: Block, script: str, may_fail: bool = False) -> str:
        """Run a script in the shell state left by the preceding blocks; return its output."""
        state = f"'{self._state}'"
        whole = (
            f"[ -f {state} ] && . {state}\n"
            f'trap \'__code=$?; {{ export -p; echo "cd \\"$PWD\\""; }} >{state}; exit $__code\' EXIT\n'
            f"set -e -o pipefail\n{script}\n"
        )
        process = subprocess.Popen(
            ["bash", "-c", whole],
            cwd=self.folder,
            env=self._environment,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            printed, _ = process.communicate()
            raise BlockFailed(f"{block.name}: did not end within {self.timeout:g} s\n{printed[-_TAIL:]}") from None
        if process.returncode and not may_fail:
            raise BlockFailed(f"{block.name}: exit status {process.returncode}\n{printed[-_TAIL:]}")
        return printed

    def _run_python(self, block: Block) -> None:
        python = self._interpreter()
        begin = self._python_output.stat().st_size
        self._pieces += 1
        path = self.folder.parent / f"{self.folder.name}-{Path(block.page).stem}-{self._pieces}.py"
        path.write_text("\n" * block.line + block.text, encoding="utf-8")  # tracebacks name the page's lines
        os.write(self._pipe, f"{path}\n".encode())
        code = path.with_name(path.name + ".code")
        deadline = time.monotonic() + self.timeout
        while not code.exists() and python.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        printed = self._python_output.read_bytes()[begin:].decode(errors="replace")[-_TAIL:]
        if not code.exists():
            ended = python.poll()
            _kill(python)
            why = f"did not end within {self.timeout:g} s" if ended is None else f"Python exited with status {ended}"
            raise BlockFailed(f"{block.name}: {why}\n{printed}")
        if code.read_text() != "0":
            raise BlockFailed(f"{block.name}: Python raised an error\n{printed}")


def _kill(process: subprocess.Popen[Any]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
