"""``python -m tools.slurm start|stop FOLDER``: a private cluster that outlives the command."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from tools.slurm.cluster import Cluster, why_not


def main() -> None:
    """Start or stop the cluster of a folder."""
    parser = argparse.ArgumentParser(prog="python -m tools.slurm", description=__doc__)
    parser.add_argument("action", choices=["start", "stop"])
    parser.add_argument("folder", type=Path, help="folder for all files of the daemons")
    given = parser.parse_args()
    cluster = Cluster(given.folder, bound=False)
    if given.action == "stop":
        cluster.stop()
        return
    reason = why_not()
    if reason is not None:
        sys.exit(f"error: {reason}")
    try:
        seconds = cluster.start()
    except RuntimeError as error:
        cluster.stop()
        sys.exit(f"error: {error}")
    print(f"# ready in {seconds:.1f} s; set these variables to use it:")
    for name, value in cluster.variables.items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
