"""The demo's command: `make demo`, or `python examples/demo/run.py`, or this script under `deepspeed` or `torchrun`.

Handles arguments, environment and exit status; :mod:`examples.demo.program` is the demo itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    # As a script: the checkout must come before any other package called `alignment` or `examples`.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from alignment.cli.guarded import guarded  # noqa: E402
from alignment.config.errors import AlignmentError  # noqa: E402
from alignment.engines.launch_env import hush_libraries, init_distributed  # noqa: E402
from alignment.run.ranks import world_size  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo; exit with status 0 if all targets are met, with 1 if any is not met or on errors."""
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Train a small model from scratch, align it with KTO, CPO and Online DPO, and compare them.",
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/demo"), help="output folder (default: %(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="retrain the initial model and the reward model")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument(
        "--local_rank", type=int, help=argparse.SUPPRESS
    )  # added by deepspeed; the environment is used instead
    given = parser.parse_args(argv)
    # Before transformers is imported: the demo needs no network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    hush_libraries()
    sys.exit(guarded(lambda: _run(given)))


def _run(given: argparse.Namespace) -> None:
    if world_size() > 1:
        raise AlignmentError(f"WORLD_SIZE={world_size()}: the demo runs in one process; start it with python")
    print("loading libraries …", flush=True)
    init_distributed(False)
    from examples.demo.folder import Settings
    from examples.demo.program import Demo

    Demo(Settings(seed=given.seed), given.output_dir, given.fresh).run()


if __name__ == "__main__":
    main()
