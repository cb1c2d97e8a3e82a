"""The ``train`` command: parse the recipe and the options, then run them under the guard."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alignment.cli.guarded import guarded
from alignment.cli.parsing import glimpse, parse
from alignment.config.options import AlignmentConfig
from alignment.config.registry import METHODS
from alignment.engines.launch_env import init_distributed
from alignment.engines.start_up import import_libraries, old_objects_spared, uncollected


def main(
    argv: Sequence[str] | None = None, program: str = "deepspeed-alignment train", *, precompute: bool = False
) -> None:
    """Train from a recipe and options, then exit with status 0, 1 after an error, or 130 after Ctrl-C.

    With ``precompute``, only compute and store the log-probs of the reference.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def job() -> None:
        with uncollected():
            options = read_options(arguments, program)
            from alignment.cli.train_job import run
        with old_objects_spared():
            run(options, precompute=precompute)

    sys.exit(guarded(job, lambda: glimpse(arguments).use_cpu))


def read_options(
    arguments: list[str], program: str, use_cpu: bool | None = None, *, data: bool = True
) -> AlignmentConfig:
    """Parse the options, join the process group and import the large libraries.

    These are imported last, so that a misspelled option fails immediately, except by the module of an outside method.
    The device is set before, because DeepSpeed chooses one when it is imported. With ``data``, a dataset is required.
    """
    before = glimpse(arguments)
    if METHODS.is_outside(before.method):
        init_distributed(before.use_cpu if use_cpu is None else use_cpu)
        import_libraries()
    options = parse(arguments, program, data=data)
    init_distributed(options.use_cpu if use_cpu is None else use_cpu)
    import_libraries()
    return options
