"""The ``train`` command: parse the recipe and the options, then run them under the guard."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence

from alignment.cli.guarded import guarded
from alignment.cli.output import surviving_closed_output
from alignment.cli.parsing import glimpse, parse
from alignment.config.registry import METHODS
from alignment.engines.garbage import old_objects_spared, uncollected
from alignment.engines.launch_env import hush_libraries, init_distributed
from alignment.engines.start_up import import_libraries


def main(
    argv: Sequence[str] | None = None, program: str = "deepspeed-alignment train", *, precompute: bool = False
) -> None:
    """Train from a recipe and options, then exit with status 0, 1 after an error, or 130 after Ctrl-C.

    Args:
        argv: arguments without the program name. Defaults to those of this process.
        program: program name in usage lines.
        precompute: only compute and store the log-probs of the reference.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    hush_libraries()
    with surviving_closed_output(), contextlib.ExitStack() as starting:
        starting.enter_context(uncollected())
        job = functools.partial(_run, arguments, program, starting.close, precompute)
        code = guarded(job, use_cpu=lambda: glimpse(arguments).use_cpu)
    sys.exit(code)


def _run(arguments: list[str], program: str, started: Callable[[], None], precompute: bool) -> None:
    before = glimpse(arguments)
    if METHODS.is_outside(before.method):
        init_distributed(before.use_cpu)  # the method's module imports torch and DeepSpeed
        import_libraries()
    options = parse(arguments, program)
    # Import torch and DeepSpeed only now, so that a misspelled option fails immediately. Set the device before:
    # DeepSpeed chooses one when it is imported, after which `use_cpu` would have no effect.
    init_distributed(options.use_cpu)
    import_libraries()
    from alignment.cli.train_job import run

    started()
    with old_objects_spared():
        run(options, precompute=precompute)
