"""The command: parse the recipe and the options, then run what they say, under the guard.

`deepspeed-alignment` and `launch/train.py` both end here.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Sequence

from alignment.config.parsing import glimpse, parse
from alignment.config.registry import METHODS
from alignment.engines.guard import guarded
from alignment.engines.launch_env import hush_libraries, init_distributed
from alignment.engines.start_up import import_libraries, uncollected


def main(argv: Sequence[str] | None = None) -> None:
    """Run a recipe with command-line overrides and exit with the code: 0, 1 after an error, 130 after Ctrl-C.

    Args:
        argv: arguments without the program's name; those of this process when None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    hush_libraries()
    with contextlib.ExitStack() as starting:
        starting.enter_context(uncollected())
        code = guarded(lambda: _run(arguments, starting.close), use_cpu=lambda: glimpse(arguments).use_cpu)
    sys.exit(code)


def _run(arguments: list[str], started: Callable[[], None]) -> None:
    before = glimpse(arguments)
    if METHODS.is_outside(before.method):
        init_distributed(before.use_cpu)  # its file imports torch and DeepSpeed
        import_libraries()
    options = parse(arguments)
    # Only now torch and DeepSpeed: a misspelt option should not wait for them. And first the device: DeepSpeed settles
    # for one as it is imported, which the trainers do, and `use_cpu` would come too late.
    init_distributed(options.use_cpu)
    import_libraries()
    from alignment.trainers.run import run

    gc.freeze()  # modules stay: DeepSpeed collects with every engine, and would look through them all again
    started()
    run(options)
