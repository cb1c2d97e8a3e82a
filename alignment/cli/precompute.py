"""The ``precompute`` command: takes the options of ``train`` and stores the reference's log-probs on disk."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alignment.cli import train
from alignment.cli.parsing import without_local_rank


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment precompute") -> None:
    """Compute and store the log-probs of the training and evaluation sets, then exit with the status of ``train``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    train.main(["--precompute_ref_log_probs=true", *without_local_rank(arguments)], program, precompute=True)
