"""Run measurements in separate processes: job and result are JSON files."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# With a launcher's variables, a measurement would start as one rank of another job.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch's prefix of each line of a traceback


class Failed(Exception):
    """A failed measurement. ``reason`` is one line; ``output`` is the end of the process's output."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.reason, self.output = reason, output


def run_module(
    module: str, place: Path, job: Mapping[str, Any], environment: Mapping[str, str], seconds: float | None = None
) -> Any:
    """Run ``python -m MODULE JOB.json RESULT.json`` and return its result.

    Args:
        module: in this repository; reads the first file and writes the second.
        place: a folder that does not exist yet, for both files and the cache of datasets.
        job: the job.
        environment: additional environment variables.
        seconds: time limit; None for no limit.

    Raises:
        Failed: if the process fails or exceeds the time limit.
    """
    place.mkdir()
    job_file, result_file = place / "job.json", place / "result.json"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    own = {
        "HF_DATASETS_CACHE": str(place / "cache"),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(job_file), str(result_file)],
        cwd=ROOT,
        env={**plain_environment(), **own, **environment},
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"timed out after {seconds:.1f} s", _killed(process)) from error
    except BaseException:
        _killed(process)
        raise
    if process.returncode:
        raise Failed(_last_line(output) or f"exit status {process.returncode}", output[-4000:])
    return json.loads(result_file.read_text(encoding="utf-8"))


def plain_environment() -> dict[str, str]:
    """Return this process's environment without a launcher's variables."""
    return {name: value for name, value in os.environ.items() if name not in _LAUNCHER}


def _killed(process: subprocess.Popen[str]) -> str:
    """Kill the process and its children; return its output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0][-4000:]


def _last_line(output: str) -> str:
    """Return the line that names the error: the last line of a traceback, or of our own message."""
    lines = [_RANK.sub("", line).strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.partition(":")[0].rpartition(" ")[2]]
    return (named or lines or [""])[-1]


def free_port() -> int:
    """Return a port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
