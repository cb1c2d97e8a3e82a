"""Two ranks and a folder that both should see: ``shared_folder.py FOLDER``. Each prints one line of JSON.

A second host is a second folder: rank 1 gets another one, as it would if the path were node-local.
"""

from __future__ import annotations

import errno
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from alignment.checkpoint import probe
from alignment.config.errors import OutputError
from alignment.engines.collectives import barrier
from alignment.engines.launch_env import init_distributed
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
        probe.check_shared_folder(folder)
    except OutputError as error:
        return str(error)
    return "shared"


@contextmanager
def on_rank(number: int, *patches: Any) -> Iterator[None]:
    """Patches on one of the ranks."""
    with ExitStack() as stack:
        for patch in patches if rank() == number else ():
            stack.enter_context(patch)
        yield


def appears(link: Path, target: Path) -> None:
    """Let a folder appear late, as with the caches of a network file system."""
    threading.Timer(0.3, lambda: link.symlink_to(target)).start()


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """The cases and their functions."""
    own = folder / str(rank())
    shared = folder / "0"
    own.mkdir()
    barrier()
    broken = mock.patch.object(probe, "_write", return_value="Read-only file system")
    yield "shared", lambda: said(shared)
    yield "to be made", lambda: said(shared / "a" / "b")
    yield "node-local", lambda: said(own / "out")
    late = folder / "late" if rank() else shared
    if rank():
        appears(late, shared)
    yield "late", lambda: said(late)
    with on_rank(1, broken):
        yield "read-only on rank 1", lambda: said(shared)
    with on_rank(0, broken):
        yield "read-only on rank 0", lambda: said(shared)
    with on_rank(1, mock.patch.object(Path, "write_text", side_effect=OSError(errno.EDQUOT, "Disk quota exceeded"))):
        yield "no quota on rank 1", lambda: said(shared)


def main() -> None:
    """Run all cases."""
    init_distributed(use_cpu=True)
    probe._PATIENCE_S = 0.6
    folder = Path(sys.argv[1])
    host = mock.patch.object(probe.socket, "gethostname", return_value=f"n{rank() + 1}")
    found: dict[str, Any] = {"waited": waited()}
    with host:
        for name, case in cases(folder):
            found[name] = case()
    barrier()
    found["left"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
