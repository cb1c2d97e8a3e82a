"""``python -m tools.architectures [TYPE …]``: examine the given types, or all types and write the table.

The table is ``docs/reference/architectures.md``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

import torch
import transformers
from transformers.utils import logging

from tools.architectures.comparison import Result, examine, types
from tools.documentation.page import REFERENCE, table, with_generated

NAME = "architectures.md"


def page(results: Sequence[Result]) -> str:
    """Render the page for the results of all types."""
    exact, refused = sum(one.exact for one in results), sum(one.refused is not None for one in results)
    where = (
        f"transformers {transformers.__version__}, with torch {torch.__version__.partition('+')[0]} on a CPU in fp32"
    )
    packed = sum(one.exact and one.unpacked is None for one in results)
    lines = [
        f"{len(results)} types in {where}: {exact} are exact, {packed} of them packed, {refused} are refused.",
        "",
    ]
    return with_generated(
        NAME,
        [
            *lines,
            *table(
                "type | class | | log-probs | gradient | rows | experts in 4 bits | ", (one.row for one in results)
            ),
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Examine types; return 1 if one is neither exact nor refused."""
    parser = argparse.ArgumentParser(prog="python -m tools.architectures", description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", choices=[*types(), []], help="model types; default: all")
    given = parser.parse_args(argv)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    results = []
    for name in given.types or types():
        results.append(examine(name))
        print(*results[-1].row, sep=" | ", flush=True)
    if not given.types:
        (REFERENCE / NAME).write_text(page(results), encoding="utf-8")
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
