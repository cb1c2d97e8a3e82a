"""``make signals``: test every launcher, signal and process of ``expected.txt`` on real runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tools.signals.run import Signals, table
from tools.trial import offline_runs


def main(argv: Sequence[str] | None = None) -> int:
    """Make the cells; return the exit status, 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.signals", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only cells whose names contain these words, as 'torchrun TERM'")
    words = set(parser.parse_args(argv).only.split())
    cells, failed = [cell for cell in table() if words <= set(cell.name.split())], 0
    with offline_runs("signals-") as (server, folder):
        signals = Signals(server, folder)
        for number, cell in enumerate(cells, 1):
            problems = signals.make(cell)
            failed += bool(problems)
            said = "".join(f"\n  {problem}" for problem in problems) or "as expected"
            print(f"{number}/{len(cells)} {cell.name}: {said}", flush=True)
    return int(bool(failed) or not cells)


if __name__ == "__main__":
    sys.exit(main())
