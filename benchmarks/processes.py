"""Measurements run in processes of their own: a job goes in as JSON, a result comes back as JSON."""

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
# A launcher's variables would start a measurement as one rank of another job.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before each line of a traceback


class Failed(Exception):
    """A measurement could not be made. ``reason`` is one line; ``output`` is the end of what the process printed."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.reason, self.output = reason, output


def run_module(
    module: str, place: Path, job: Mapping[str, Any], environment: Mapping[str, str], seconds: float | None = None
) -> Any:
    """What ``python -m MODULE JOB.json RESULT.json`` answers.

    Args:
        module: in this repository; it reads the first file and writes the second.
        place: a folder that does not exist yet, for both files and the cache of datasets.
        job: what it is asked.
        environment: variables beside this process's own.
        seconds: it is ended after so many; None: no limit.

    Raises:
        Failed: it ended with an error, or not in time.
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
        raise Failed(f"did not end within {seconds:.1f} s", _killed(process)) from error
    except BaseException:
        _killed(process)
        raise
    if process.returncode:
        raise Failed(_last_line(output) or f"exit code {process.returncode}", output[-4000:])
    return json.loads(result_file.read_text(encoding="utf-8"))


def plain_environment() -> dict[str, str]:
    """This process's environment without a launcher's variables."""
    return {name: value for name, value in os.environ.items() if name not in _LAUNCHER}


def _killed(process: subprocess.Popen[str]) -> str:
    """End the process and what it started; return what it printed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0][-4000:]


def _last_line(output: str) -> str:
    """The line that names the error: the last one of a traceback or of a message of ours."""
    lines = [_RANK.sub("", line).strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.partition(":")[0].rpartition(" ")[2]]
    return (named or lines or [""])[-1]


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
