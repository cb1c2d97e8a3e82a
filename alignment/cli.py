"""The command: parse the recipe and the options, then run what they say, under the guard.

`deepspeed-alignment` and `launch/train.py` both end here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from alignment.config.errors import AlignmentError
from alignment.engines.guard import guarded
from alignment.engines.launch_env import hush_libraries, init_distributed


def main(argv: Sequence[str] | None = None) -> None:
    """Run a recipe with command-line overrides and exit with the code: 0, 1 after an error, 130 after Ctrl-C.

    Args:
        argv: arguments without the program's name; those of this process when None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    hush_libraries()
    sys.exit(guarded(lambda: _run(arguments), use_cpu=lambda: wants_cpu(arguments)))


def _run(arguments: list[str]) -> None:
    from alignment.config.parsing import parse

    options = parse(arguments)
    # Only now torch and DeepSpeed: a misspelt option should not wait for them. And first the device: DeepSpeed settles
    # for one as it is imported, which the trainers do, and `use_cpu` would come too late.
    init_distributed(options.use_cpu)
    from alignment.trainers.run import run

    run(options)


def wants_cpu(arguments: list[str]) -> bool:
    """Whether `use_cpu` is set, on the command line or else in the recipe; False where these cannot be read.

    Several ranks form their group before the options are checked, so that a wrong one is reported once, not by each.
    This is the one option which the group itself needs.
    """
    from alignment.config.parsing import read_arguments
    from alignment.config.recipes import read_recipe

    try:
        recipe, given = read_arguments(arguments)
        if "use_cpu" not in given and recipe is not None:
            given = read_recipe(recipe)
    except AlignmentError:
        return False  # `parse` says so, once there is a group
    return str(given.get("use_cpu", False)).lower() in ("true", "1", "yes", "on")
