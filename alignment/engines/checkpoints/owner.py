"""Who owns an output folder: which process, and whether it still lives as far as another process can know."""

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
_HIDDEN = ""  # the start of a process that exists and shows nothing of itself


class Standing(enum.Enum):
    """What is known of an owner without watching it."""

    LIVES = enum.auto()
    GONE = enum.auto()
    UNKNOWN = enum.auto()


@dataclass(frozen=True)
class Owner:
    """A process, described so that another one can look for it.

    Attributes:
        host: name of its host.
        boot: of the kernel it runs on, different on every machine and after every restart of one; "" if unknown.
        space: its PID namespace, for a container has numbers of its own; "" if unknown.
        pid: its number there.
        start: when it started, by a clock that only starts of the same ``boot`` share: numbers are used again.
        cluster, job: of SLURM; "" outside of it.
        restarts: how often SLURM has requeued the job.
        token: of this lock; one process may take several, one after another.
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
        """The owner that a lock file names; None if it was torn, or is no lock file."""
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
        """A lock file: one line of JSON that ends with the heartbeat, see :func:`beat`."""
        head = json.dumps(asdict(self)).removesuffix("}")
        return f'{head}, "heartbeat": '.encode() + beat(0)

    def standing(self, observer: Owner) -> Standing:
        """Whether this owner lives, as far as ``observer``, the calling process, can know at once.

        Only processes of the same PID namespace on the same running kernel can be looked up: the number of one in
        another container, if it is there at all, is that of a stranger. A host's name says nothing about that.
        """
        if (self.host, self.boot, self.space) != (observer.host, observer.boot, observer.space):
            same_job = bool(self.job) and (self.cluster, self.job) == (observer.cluster, observer.job)
            return Standing.GONE if same_job and self.restarts < observer.restarts else Standing.UNKNOWN
        if (self.pid, self.start) == (observer.pid, observer.start):
            return Standing.GONE  # another trainer of the calling process, which has come to the next
        start = process_start(self.pid)
        if start == _HIDDEN:
            return Standing.UNKNOWN
        return Standing.LIVES if start == self.start else Standing.GONE

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" (SLURM job {self.job})" if self.job else "")


def beat(count: int) -> bytes:
    """The end of a lock file with its ``count``-th heartbeat, always of the same length."""
    return f"{count:>{_BEAT_WIDTH}}}}\n".encode()


def process_start(pid: int) -> str | None:
    """When a process started, for comparison only; None if there is none, "" if it can be known but to others.

    The kernel counts from its own start. The time of day, which psutil computes from that, moves when a clock is set.
    """
    try:
        shown = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return _hidden_start(pid) if Path("/proc/self/stat").exists() else _start_without_proc(pid)
    after_name = shown.rpartition(")")[2].split()
    state, start = after_name[0], after_name[19]
    return None if state in "ZX" else start  # dead, and its parent has not asked for its status yet


def _hidden_start(pid: int) -> str | None:
    """Of a process that /proc does not show: it may be mounted so that users see their own only."""
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
