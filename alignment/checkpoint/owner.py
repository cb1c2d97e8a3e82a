"""The owner of an output folder: which process it is, and whether another process can tell that it is alive."""

from __future__ import annotations

import enum
import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import psutil

_BEAT_WIDTH = 12
_HIDDEN = ""  # start time of a process that exists but is hidden


class Standing(enum.Enum):
    """State of an owner as far as it is known without watching it."""

    LIVES = enum.auto()
    GONE = enum.auto()
    UNKNOWN = enum.auto()


@dataclass(frozen=True)
class Owner:
    """A process, described so that another one can look it up.

    Attributes:
        host: host name.
        boot: Boot ID of its kernel, unique per machine and boot; "" if unknown.
        space: PID namespace, since containers have their own; "" if unknown.
        pid: process ID in this namespace.
        start: start time, comparable only within the same ``boot``, because PIDs are reused.
        cluster, job: SLURM cluster and job; "" outside of SLURM.
        restarts: number of times SLURM has requeued the job.
        token: ID of this lock; one process may acquire several, one after another.
    """

    host: str
    boot: str
    space: str
    pid: int
    start: str
    cluster: str
    job: str
    restarts: int
    token: str

    @classmethod
    def this_process(cls) -> Owner:
        """The calling process, with a new token."""
        restarts = os.environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            host=socket.gethostname(),
            boot=_boot(),
            space=_space(),
            pid=os.getpid(),
            start=process_start(os.getpid()) or _HIDDEN,
            cluster=os.environ.get("SLURM_CLUSTER_NAME", ""),
            job=os.environ.get("SLURM_JOB_ID", ""),
            restarts=int(restarts) if restarts.isdecimal() else 0,
            token=uuid.uuid4().hex,
        )

    @classmethod
    def parsed(cls, text: bytes) -> Owner | None:
        """Parse a lock file; None if it is torn, or not a lock file."""
        try:
            found = json.loads(text)
        except ValueError:
            return None
        names = {field.name: int if field.name in ("pid", "restarts") else str for field in fields(cls)}
        if not isinstance(found, dict) or any(type(found.get(name)) is not kind for name, kind in names.items()):
            return None
        owner = cls(**{name: found[name] for name in names})
        return owner if 0 < owner.pid < 2**31 else None

    def text(self) -> bytes:
        """The content of the lock file: one line of JSON that ends with the heartbeat, see :func:`beat`."""
        head = json.dumps(asdict(self)).removesuffix("}")
        return f'{head}, "heartbeat": '.encode() + beat(0)

    def standing(self, observer: Owner) -> Standing:
        """Whether this owner is alive, as far as ``observer``, the calling process, can tell immediately.

        Only processes of the same PID namespace on the same running kernel can be looked up: a PID of another
        container, if it exists here, belongs to an unrelated process. Host names do not help.
        """
        if (self.host, self.boot, self.space) != (observer.host, observer.boot, observer.space):
            same_job = bool(self.job) and (self.cluster, self.job) == (observer.cluster, observer.job)
            return Standing.GONE if same_job and self.restarts < observer.restarts else Standing.UNKNOWN
        if (self.pid, self.start) == (observer.pid, observer.start):
            return Standing.GONE  # an earlier trainer of the calling process
        start = process_start(self.pid)
        if start == _HIDDEN:
            return Standing.UNKNOWN
        return Standing.LIVES if start == self.start else Standing.GONE

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" (SLURM job {self.job})" if self.job else "")


def beat(count: int) -> bytes:
    """The end of a lock file with heartbeat number ``count``, always of the same length."""
    return f"{count:>{_BEAT_WIDTH}}}}\n".encode()


def process_start(pid: int) -> str | None:
    """The start time of a process, for comparison only; None if there is no such process, "" if it is hidden.

    The kernel counts from boot. The time of day, which psutil derives from that, changes when the clock is set.
    """
    try:
        shown = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return _hidden_start(pid) if Path("/proc/self/stat").exists() else _start_without_proc(pid)
    after_name = shown.rpartition(")")[2].split()
    state, start = after_name[0], after_name[19]
    return None if state in "ZX" else start  # dead, but not yet reaped by its parent


def _hidden_start(pid: int) -> str | None:
    """The start time of a process that /proc does not show: it may be mounted with hidepid."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return None if isinstance(error, ProcessLookupError) else _HIDDEN
    return _HIDDEN


def _start_without_proc(pid: int) -> str | None:
    try:
        return f"{psutil.Process(pid).create_time():.0f}"
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return _HIDDEN


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
