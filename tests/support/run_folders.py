"""Output folders as written by runs, created manually: status, log, lock and checkpoints."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from alignment.checkpoint.manifest import Manifest, files_in, record_of
from alignment.run.lock import LOCK
from alignment.run.status_file import STATUS, RunStatus

BEGAN = 1_790_000_000.0  # 2026-09-21 14:13:20 UTC
HOLDER = "process 4711 on node7 (SLURM job 77)"


def at(seconds: float) -> str:
    """Return a time in the format of the log, in seconds after the start of the run."""
    time = datetime.fromtimestamp(BEGAN + seconds, timezone.utc)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def write_log(folder: Path, records: list[dict[str, Any]], torn: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + torn)


def start(steps: int = 100) -> dict[str, Any]:
    names = {"run": "r", "run_name": "a run", "method": "kto", "world_size": 2, "window": 8, "rows": 64}
    return {"event": "start", **names, "steps": steps, "dropped": {}, "time": at(0)}


def entry(step: int, seconds: float, tokens: int, **more: Any) -> dict[str, Any]:
    return {"loss": 1 / step, **more, "num_tokens": tokens, "step": step, "epoch": step / 100, "time": at(seconds)}


def end(phases: dict[str, float]) -> list[dict[str, Any]]:
    """Return the last two lines of a log."""
    records = {name: {"seconds": s, "tokens": 7, "peak_bytes": 1, "entries": 1} for name, s in phases.items()}
    totals = {"train_runtime": 50.0, "train_steps_per_second": 2.0, "train_loss": 0.3, "num_tokens": 1000}
    return [{**totals, "step": 100, "time": at(60)}, {"event": "end", "phases": records, "time": at(60)}]


def write_status(folder: Path, **values: Any) -> RunStatus:
    folder.mkdir(parents=True, exist_ok=True)
    known = {"method": "kto", "run": "r", "host": "node7", "pid": 4711, "step": 40, "total_steps": 100, "time": at(41)}
    status = RunStatus(**{**known, **values})
    (folder / STATUS).write_text(status.text())
    return status


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder, as a run does that is in progress."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        file.write(HOLDER)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_checkpoint(folder: Path, step: int, *, resumable: bool = True, total_steps: int = 100) -> Path:
    target = folder / f"checkpoint-{step}"
    target.mkdir(parents=True)
    (target / "model.safetensors").write_bytes(os.urandom(3000))
    files = {name: record_of(target / name) for name in files_in(target)}
    Manifest("r", step, "kto", 1, 0, 8, total_steps, resumable, {}, {}, {}, files).write(target)
    return target


@contextmanager
def holding(folder: Path, job: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that holds the lock of a folder until it is killed, and leaves its file."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        process = subprocess.Popen(["sleep", "600"], pass_fds=[file.fileno()])  # it has the descriptor, and the lock
        file.write(f"process {process.pid} on {socket.gethostname()}{job and f' (SLURM job {job})'}")
    try:
        yield process
    finally:
        process.kill()
        process.wait()
