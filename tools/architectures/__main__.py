"""``python -m tools.architectures [TYPE …]``: examine the given types, or all types and write the table.

The table is ``docs/reference/architectures.md``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from transformers.utils import logging

from tools.architectures.comparison import examine, types
from tools.architectures.table import PAGE, page, row


def main(argv: Sequence[str] | None = None) -> int:
    """Examine types; return 1 if one is neither exact nor refused."""
    parser = argparse.ArgumentParser(prog="python -m tools.architectures", description=__doc__)
    parser.add_argument(
        "types", nargs="*", metavar="TYPE", help="model types, as in configurations; default: all types"
    )
    given = parser.parse_args(argv)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    unknown = set(given.types) - types().keys()
    if unknown:
        parser.error(f"unknown causal language model type: {' or '.join(sorted(unknown))}")
    results = []
    for name in given.types or types():
        results.append(examine(name))
        print(row(results[-1]), flush=True)
    if not given.types:
        PAGE.write_text(page(results), encoding="utf-8")
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
