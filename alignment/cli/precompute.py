"""The ``precompute`` command: takes the options of ``train`` and stores the reference's log-probs on disk."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alignment.cli import train

_OPTION = "--precompute_ref_log_probs"


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment precompute") -> None:
    """Compute and store the log-probs of the training and evaluation sets, then exit with the status of ``train``.

    Args:
        argv: arguments without the program name. Defaults to those of this process.
        program: program name in usage lines.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not any(argument.partition("=")[0] == _OPTION for argument in arguments):
        arguments.append(_OPTION)
    train.main(arguments, program, precompute=True)
