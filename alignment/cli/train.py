"""The command ``train``: parse the recipe and the options, then run what they say, under the guard."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence

from alignment.cli.output import surviving_closed_output
from alignment.cli.parsing import glimpse, parse
from alignment.config.registry import METHODS
from alignment.engines.garbage import old_objects_spared, uncollected
from alignment.engines.guard import guarded
from alignment.engines.launch_env import hush_libraries, init_distributed
from alignment.engines.start_up import import_libraries


def main(
    argv: Sequence[str] | None = None, program: str = "deepspeed-alignment train", *, precompute: bool = False
) -> None:
    """Run a recipe with command-line overrides and exit with the code: 0, 1 after an error, 130 after Ctrl-C.

    Args:
        argv: arguments without the program's name; those of this process when None.
        program: what usage lines call this command.
        precompute: end where the log-probs of the reference are kept.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    hush_libraries()
    with surviving_closed_output(), contextlib.ExitStack() as starting:
        starting.enter_context(uncollected())
        code = guarded(
            lambda: _run(arguments, program, starting.close, precompute), use_cpu=lambda: glimpse(arguments).use_cpu
        )
    sys.exit(code)


def _run(arguments: list[str], program: str, started: Callable[[], None], precompute: bool) -> None:
    before = glimpse(arguments)
    if METHODS.is_outside(before.method):
        init_distributed(before.use_cpu)  # its file imports torch and DeepSpeed
        import_libraries()
    options = parse(arguments, program)
    # Only now torch and DeepSpeed: a misspelt option should not wait for them. And first the device: DeepSpeed settles
    # for one as it is imported, which the methods do, and `use_cpu` would come too late.
    init_distributed(options.use_cpu)
    import_libraries()
    from alignment.cli.train_job import run

    started()
    with old_objects_spared():
        run(options, precompute=precompute)
