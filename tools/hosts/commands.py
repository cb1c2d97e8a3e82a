"""The command lines that start one rank on each of two hosts, by each launcher."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tools.hosts.network import NAMES

LAUNCHERS = ("torchrun", "no_ssh", "pdsh")
HOSTFILE = "".join(f"{name} slots=1\n" for name in NAMES)


def commands(launcher: str, script: Path, arguments: Sequence[str], port: int, hostfile: Path) -> list[list[str]]:
    """One command line for each host on which a command has to be given; with ``pdsh`` the first one is enough.

    Args:
        launcher: one of :data:`LAUNCHERS`; the two last are ``deepspeed`` with and without ``--no_ssh``.
        script: what each rank runs.
        arguments: of the script.
        port: at which the ranks meet, on the first host.
        hostfile: with :data:`HOSTFILE`.
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
