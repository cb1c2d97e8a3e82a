"""The demo's command: `make demo`, or `python examples/demo/run.py`, or this script under `deepspeed` or `torchrun`.

Arguments, environment and exit code; what it does is in :mod:`examples.demo.program`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    # As a script: the checkout comes first, before any other package called `alignment` or `examples`.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from alignment.config.errors import AlignmentError  # noqa: E402
from alignment.engines.guard import guarded  # noqa: E402
from alignment.engines.launch_env import hush_libraries, init_distributed, world_size  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo and exit: 0 when every promise was kept, 1 when one was missed or anything failed."""
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Align a small model, made from nothing, with KTO, CPO and Online DPO; compare.",
    )
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo"), help="folder (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="train kept models again (start and reward model)")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default: %(default)s)")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # deepspeed adds it; the environment counts
    given = parser.parse_args(argv)
    # Before transformers is imported: nothing here comes from the network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    hush_libraries()
    sys.exit(guarded(lambda: _run(given)))


def _run(given: argparse.Namespace) -> None:
    if world_size() > 1:
        raise AlignmentError(f"WORLD_SIZE={world_size()}: the demo runs in one process; start it with plain python")
    print("loading libraries …", flush=True)
    init_distributed(False)
    from examples.demo.folder import Settings
    from examples.demo.program import Demo

    Demo(Settings(seed=given.seed), given.output_dir, given.fresh).run()


if __name__ == "__main__":
    main()
