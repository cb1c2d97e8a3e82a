"""Start and stop the daemons of a private cluster, and simulate the loss of nodes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tools.ranks.process import die_with_parent
from tools.slurm.settings import LOOPBACK, NODES, address, write_settings

_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")
_UNSHARE = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
# The first process of a node is a shell, which reaps orphaned processes. When it exits, all others are killed.
_NODE = 'hostname "$1" && mount --bind "$2" /etc/hosts && { slurmd -D -N "$1" & wait "$!"; }'


def why_not() -> str | None:
    """Return why no cluster can be started on this machine, or None."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} not found: `make slurm` installs the packages slurm-wlm and munge"
    if os.geteuid() != 0:
        return "several SLURM nodes on one machine require root"
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"namespaces cannot be created: {tried.stderr.strip()}"


class Cluster:
    """A controller and the nodes of :data:`~tools.slurm.settings.NODES`, with all their files in one folder.

    Args:
        folder: folder of the cluster; created if it does not exist.
        bound: stop the daemons when the calling process exits.
    """

    def __init__(self, folder: Path, *, bound: bool = True) -> None:
        self.folder, self.bound = folder.resolve(), bound

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that a process needs to use the cluster."""
        found = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        # If the machine only has a loopback address, the nodes can communicate over it, but a run must be told so.
        return found | {"GLOO_SOCKET_IFNAME": "lo"} if address() == LOOPBACK else found

    def start(self) -> float:
        """Start the daemons and wait until every node is ready.

        Returns:
            The duration in seconds.
        """
        begun = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._pids():
            raise RuntimeError(f"{self.folder}: a cluster is already running; stop it first")
        (self.folder / "state").mkdir(exist_ok=True)
        write_settings(self.folder)
        munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        files = [f"--{option}={self.folder / name}" for option, name in {**munge, "seed-file": "munge.seed"}.items()]
        self._daemon("munged", ["munged", "--foreground", "--force", "--num-threads=2", *files])
        _until(lambda: (self.folder / "munge.socket").exists(), 10, "munged did not start")
        self._daemon("slurmctld", ["slurmctld", "-D"])
        for node in NODES:
            self._daemon(node, [*_UNSHARE, "bash", "-c", _NODE, "node", node, str(self.folder / "hosts")])
        _until(lambda: self.ready(*NODES), 30, f"the nodes did not start; see {self.folder}/*.log")
        return time.monotonic() - begun

    def stop(self) -> None:
        """Kill all nodes with their processes, then stop the other daemons."""
        for name, process in self._pids().items():
            process.send_signal(signal.SIGKILL if name in NODES else signal.SIGTERM)
        _, left = psutil.wait_procs(self._pids().values(), timeout=10)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)
        (self.folder / "pids.json").unlink(missing_ok=True)

    def lose(self, node: str) -> None:
        """Kill everything on a node immediately, as in a power failure.

        The node is not restarted. SLURM resends undelivered messages after a minute, which could then affect a
        requeued job with the same ID; with SLURM's default times, jobs are not restarted that early.
        """
        process = self._pids()[node]
        process.kill()
        process.wait(10)

    def ready(self, *nodes: str) -> bool:
        """Return whether jobs can start on these nodes."""
        shown = self.run("sinfo", "--noheader", "--Node", "--nodes", ",".join(nodes), "--format", "%N %T").stdout
        states = dict(line.split() for line in shown.splitlines())
        return len(states) == len(nodes) and set(states.values()) <= {"idle", "mixed", "allocated", "completing"}

    def run(self, *command: str, timeout: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command outside of the nodes, like on a login node."""
        env = {**os.environ, **self.variables, **variables}
        return subprocess.run(
            command, env=env, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout, check=False
        )

    def _daemon(self, name: str, command: list[str]) -> None:
        parent = os.getpid()
        with (self.folder / f"{name}.out").open("ab") as output:
            process = subprocess.Popen(
                command,
                env={"PATH": _PATH, "LANG": "C.UTF-8", **self.variables},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=(lambda: die_with_parent(parent, signal.SIGKILL)) if self.bound else None,
            )
        known = {other: [found.pid, found.create_time()] for other, found in self._pids().items()}
        known[name] = [process.pid, psutil.Process(process.pid).create_time()]
        (self.folder / "pids.json").write_text(json.dumps(known))

    def _pids(self) -> dict[str, psutil.Process]:
        """Return the running daemons by name."""
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for name, (pid, created) in json.loads((self.folder / "pids.json").read_text()).items():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                        found[name] = process
        return found


def _until(reached: Callable[[], bool], seconds: float, otherwise: str) -> None:
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            raise RuntimeError(f"{otherwise} (waited for {seconds:g} s)")
        time.sleep(0.02)
