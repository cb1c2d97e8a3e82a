"""Two ranks and a folder that both should see: ``shared_folder.py FOLDER``. Each prints one line of JSON.

A second host is a second folder: rank 1 gets another one, as it would if the path were node-local.
"""

from __future__ import annotations

import errno
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from alignment.checkpoint import run_folder
from alignment.config.errors import OutputError
from alignment.engines.collectives import barrier
from alignment.engines.launch_env import init_distributed
from alignment.run.lock import LOCK
from alignment.run.ranks import rank

_LATE_S = 0.4


def waited() -> list[float]:
    """Seconds in two barriers, with a different late rank each, where an all-reduce would return immediately."""
    reduce, works = dist.all_reduce, []

    def at_once(*arguments: Any, **options: Any) -> None:
        works.append(reduce(*arguments, **options | {"async_op": True}))

    seconds = []
    with mock.patch.object(dist, "all_reduce", at_once):
        for late in (1, 0):
            if rank() == late:
                time.sleep(_LATE_S)
            start = time.monotonic()
            barrier()
            seconds.append(time.monotonic() - start)
    for work in works:
        work.wait()
    return seconds


def said(folder: Path) -> str:
    """This rank's error for its folder."""
    try:
        run_folder.check_shared_folder(folder)
    except OutputError as error:
        return str(error)
    return ""


def said_if_read_only(folder: Path, on: int) -> str:
    """This rank's error if a rank cannot write."""
    error = OSError(errno.EROFS, "Read-only file system")
    with mock.patch.object(run_folder.tempfile, "TemporaryFile", side_effect=error if rank() == on else None):
        return said(folder)


def main() -> None:
    """Run all cases."""
    init_distributed(use_cpu=True)
    run_folder._SHARED_S = 0.6
    folder = Path(sys.argv[1])
    shared, own, late = folder / "0", folder / str(rank()), folder / "late"
    own.mkdir()
    (own / LOCK).write_text(f"process 1 on n{rank() + 1}")  # that of rank 1 is of an earlier run on its own disk
    found: dict[str, Any] = {"waited": waited()}
    with mock.patch.object(run_folder.socket, "gethostname", return_value=f"n{rank() + 1}"):
        found["shared"] = said(shared)
        found["node-local"] = said(own)
        if rank():
            threading.Timer(0.3, lambda: late.symlink_to(shared)).start()
        found["late"] = said(late if rank() else shared)
        for on in (0, 1):
            found[f"read-only on {on}"] = said_if_read_only(shared, on)
    barrier()
    found["left"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
