"""The command lines of each launcher for one rank on each of two hosts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tools.hosts.network import NAMES

LAUNCHERS = ("torchrun", "no_ssh", "pdsh")
HOSTFILE = "".join(f"{name} slots=1\n" for name in NAMES)


def commands(launcher: str, script: Path, arguments: Sequence[str], port: int, hostfile: Path) -> list[list[str]]:
    """Return a command line for each host on which a command must be started; with ``pdsh``, only the first host.

    Args:
        launcher: one of :data:`LAUNCHERS`; the last two are ``deepspeed`` with and without ``--no_ssh``.
        script: the script that each rank runs.
        arguments: arguments of the script.
        port: rendezvous port on the first host.
        hostfile: path of a file with :data:`HOSTFILE`.
    """
    where = ["--master_addr", NAMES[0], "--master_port", str(port)]
    if launcher == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", *where]
    else:
        start = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), *where]
    own = [str(script), *arguments]
    if launcher == "pdsh":
        return [[*start, *own]]
    no_ssh = ["--no_ssh"] if launcher == "no_ssh" else []
    return [[*start, *no_ssh, "--node_rank", str(number), *own] for number in range(len(NAMES))]
