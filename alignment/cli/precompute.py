"""The command ``precompute``: the options of ``train``; it ends where the reference's log-probs are on disk."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alignment.cli import train

_OPTION = "--precompute_ref_log_probs"


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment precompute") -> None:
    """Fill the stores of the training and evaluation sets and exit with the code, as ``train`` does.

    Args:
        argv: arguments without the program's name; those of this process when None.
        program: what usage lines call this command.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not any(argument.partition("=")[0] == _OPTION for argument in arguments):
        arguments.append(_OPTION)
    train.main(arguments, program, precompute=True)
