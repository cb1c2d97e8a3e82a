"""Extensions that DeepSpeed compiles at their first use: a folder for each host, and a message while one is locked."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from alignment.run.ranks import local_rank

VARIABLE = "TORCH_EXTENSIONS_DIR"
_TELL_S = 60.0


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Within this context, extensions are compiled in a folder of this host, and a lock that remains is reported.

    With several hosts, torch's own folder may be on a disk that they share.
    """
    from torch.utils.cpp_extension import get_default_build_root

    if VARIABLE not in os.environ and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        os.environ[VARIABLE] = f"{get_default_build_root()}/{socket.gethostname()}-{sys.implementation.cache_tag}"
    timer = threading.Timer(_TELL_S, _report, [Path(os.environ.get(VARIABLE) or get_default_build_root())])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _report(folder: Path) -> None:
    # torch creates this file, and waits without a limit for it to vanish.
    for lock in folder.rglob("lock") if local_rank() == 0 else ():
        text = f"waiting for an extension that is compiled in {lock.parent}; if no process is compiling, a killed one"
        print(f"{text} has left {lock}: remove this file and start again", file=sys.stderr, flush=True)
