"""A rank that moves to a separate host and joins the others: on_hosts.py HOSTS_FILE PID_OF_A PID_OF_B.

Ranks are forked from a server that has imported the libraries, which takes a third of a start by a launcher.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from alignment.cli.guarded import guarded
from alignment.run import joining
from tools.hosts.network import NAMES, Host


def main() -> None:
    """Sum the ranks' numbers."""
    import torch

    total = torch.tensor([float(os.environ["RANK"]) + 1])
    torch.distributed.all_reduce(total)
    here = os.environ["LOCAL_WORLD_SIZE"]
    os.write(1, f"rank {os.environ['RANK']} on {os.uname().nodename}, {here} here: sum {total.item():g}\n".encode())


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    Host(NAMES[rank], int(sys.argv[2:][rank])).enter(Path(sys.argv[1]))
    del os.environ["LOCAL_WORLD_SIZE"]
    os.environ.update(LOCAL_RANK="0", MASTER_ADDR=os.environ.get("MEET_AT", NAMES[0]))
    joining._CONNECT_S = 10.0
    sys.exit(guarded(main, use_cpu=True))
