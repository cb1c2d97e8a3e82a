"""Start and stop the daemons of a private cluster, and simulate the loss of nodes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from tools.ranks.process import die_with_parent, free_port, wait_until

NODES = ("n1", "n2", "n3", "n4", "n5", "n6")
# Jobs of the partition high preempt those in low, after a grace period.
PARTITIONS = {
    "gpu": "Nodes=n[1-4] Default=YES",
    "cpu": "Nodes=n5",
    "low": "Nodes=n6 PriorityTier=1 GraceTime=8",
    "high": "Nodes=n6 PriorityTier=2",
}
# The times are short: a lost node is detected after 15 s (default: 6 minutes), a requeued job waits for 5 s (default:
# 2 minutes). Processes are not bound to the cores and GPUs that a node reports.
_CONF = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldTimeout=30
SlurmdTimeout=10
MessageTimeout=5
TCPTimeout=1
KillWait=10
ReturnToService=2
MinJobAge=3600
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
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
    """A controller and the nodes of :data:`NODES`, with all their files in one existing folder.

    The daemons end with this process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        # The nodes communicate over loopback; a run must be told so.
        self.variables = {"SLURM_CONF": str(self.folder / "slurm.conf"), "GLOO_SOCKET_IFNAME": "lo"}
        self._write_settings()

    def start(self) -> None:
        """Start the daemons and wait until every node is ready."""
        munge = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        files = [f"--{option}={self.folder / name}" for option, name in {**munge, "seed-file": "munge.seed"}.items()]
        self._start("munged", "munged", "--foreground", "--force", "--num-threads=2", *files)
        wait_until((self.folder / "munge.socket").exists, 10, lambda: "munged did not start")
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self._start(node, *_UNSHARE, "bash", "-c", _NODE, "node", node, str(self.folder / "hosts"))
        wait_until(self._ready, 30, lambda: f"the nodes did not start; see {self.folder}/*.log")

    def stop(self) -> None:
        """Kill all daemons, and the nodes with all of their processes."""
        for process in self._daemons.values():
            process.kill()
            process.wait()

    def lose(self, node: str) -> None:
        """Kill everything on a node immediately, as in a power failure. The node is not restarted."""
        self._daemons[node].kill()
        self._daemons[node].wait(10)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command outside of the nodes, like on a login node."""
        given: Any = {"env": {**os.environ, **self.variables}, "stdin": subprocess.DEVNULL, "timeout": 60}
        return subprocess.run(command, text=True, capture_output=True, check=False, **given)

    def _ready(self) -> bool:
        states = self.run("sinfo", "--noheader", "--Node", "--format", "%N %T").stdout.split("\n")
        return {line.split()[0] for line in states if line.endswith(("idle", "mixed", "allocated"))} == set(NODES)

    def _start(self, name: str, *command: str) -> None:
        parent = os.getpid()
        with (self.folder / f"{name}.out").open("ab") as output:
            given: Any = {
                "stdin": subprocess.DEVNULL,
                "stdout": output,
                "stderr": subprocess.STDOUT,
                "cwd": self.folder,
            }
            given |= {"env": {"PATH": _PATH, "LANG": "C.UTF-8", **self.variables}, "start_new_session": True}
            given["preexec_fn"] = lambda: die_with_parent(parent, signal.SIGKILL)
            self._daemons[name] = subprocess.Popen(command, **given)

    def _write_settings(self) -> None:
        folder, host = self.folder, socket.gethostname()
        (folder / "state").mkdir()
        controller, *ports = (free_port() for _ in range(1 + len(NODES)))
        lines = [_CONF.format(host=host, port=controller, folder=folder)]
        for name, port in zip(NODES, ports):
            gres = " Gres=gpu:2" if name in ("n1", "n2", "n3", "n4") else ""
            where = f"NodeHostname={name} NodeAddr=127.0.0.1 Port={port}"
            lines.append(f"NodeName={name} {where} CPUs=8 RealMemory=1000{gres} State=UNKNOWN\n")
        lines += [f"PartitionName={name} {rest} MaxTime=2-0 State=UP\n" for name, rest in PARTITIONS.items()]
        (folder / "slurm.conf").write_text("".join(lines))
        (folder / "gres.conf").write_text(f"NodeName=n[1-4] Name=gpu File={folder}/gpu[1-2]\n")
        for name in ("gpu1", "gpu2", "cgroup.conf"):
            (folder / name).touch()
        (folder / "hosts").write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", host, *NODES)))
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
