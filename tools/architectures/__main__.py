"""``python -m tools.architectures [TYPE …]`` examines these types, or all of them and writes the reference page."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from transformers.utils import logging

from tools.architectures.comparison import examine, types
from tools.architectures.table import PAGE, page, row


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if a type is neither exact nor refused."""
    parser = argparse.ArgumentParser(prog="python -m tools.architectures", description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="as configurations call it; all if none is given")
    given = parser.parse_args(argv)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    unknown = set(given.types) - types().keys()
    if unknown:
        parser.error(f"no causal language model is called {' or '.join(sorted(unknown))}")
    results = []
    for name in given.types or types():
        results.append(examine(name))
        print(row(results[-1]), flush=True)
    if not given.types:
        PAGE.write_text(page(results), encoding="utf-8")
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
