"""The server, which imports the libraries once and forks a keeper for each job, which forks and monitors its ranks.

Usage: ``python -m tools.ranks.server SOCKET``; :class:`tools.ranks.client.RankServer` starts it. It exits when its
standard input is closed, and no process that it forked outlives it. It does not import `alignment`: a rank imports the
tree that its job names, so one server can run several versions.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from multiprocessing.connection import Connection

from tools.ranks.job import Job
from tools.ranks.process import die_with_parent, keep, run_as_main

# The modules that runs of the tests import, with what these import. A missing one only costs each rank its import.
LIBRARIES = (
    *("torch.utils.cpp_extension", "datasets", "peft", "bitsandbytes.optim", "matplotlib.pyplot", "pytest"),
    *("transformers.integrations", "transformers.trainer_callback", "transformers.generation.continuous_batching"),
    *("transformers.models.llama.modeling_llama", "transformers.models.mixtral.modeling_mixtral"),
    *("transformers.models.gemma2.modeling_gemma2", "transformers.models.cohere.modeling_cohere"),
    *("deepspeed.ops.adam", "deepspeed.runtime.zero.stage3"),
)


def serve(address: str) -> Job:
    """Accept jobs until standard input is closed. Returns in a forked rank, with its job; never in the server."""
    door = socket.socket(socket.AF_UNIX)
    door.bind(address)
    door.listen()
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([door, sys.stdin.fileno()], [], [])
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1):
            sys.exit()
        if door in ready:
            accepted, _ = door.accept()
            with Connection(accepted.detach()) as connection:
                server = os.getpid()
                if not os.fork():
                    die_with_parent(server, signal.SIGTERM)
                    job = keep(connection)
                    if job is None:
                        os._exit(0)
                    return job
        with contextlib.suppress(ChildProcessError):  # there is none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def main() -> None:
    """Import, then serve. A forked rank continues from here with its script."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # torch reads this at import, so the guard of a forked rank is too late; the ranks of a launcher set it in time.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # DeepSpeed collects garbage for every engine, which would take 0.3 s with the libraries' objects
    run_as_main(serve(sys.argv[1]))


if __name__ == "__main__":
    main()
