"""``make signals``: test every launcher, signal and process of ``expected.txt`` on real runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tools.ranks import RankServer
from tools.signals.judge import table
from tools.signals.run import Signals
from tools.trial import workspace


def main(argv: Sequence[str] | None = None) -> int:
    """Make the cells; return the exit status, 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.signals", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only cells whose names contain these words, as 'torchrun TERM'")
    words = set(parser.parse_args(argv).only.split())
    cells, server, failed = [cell for cell in table() if words <= set(cell.name.split())], RankServer(), 0
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    with workspace("signals-") as folder:
        os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "cache"))
        try:
            signals = Signals(server, folder)
            for number, cell in enumerate(cells, 1):
                problems = signals.make(cell)
                failed += bool(problems)
                said = "".join(f"\n  {problem}" for problem in problems) or "as expected"
                print(f"{number}/{len(cells)} {cell.name}: {said}", flush=True)
        finally:
            server.close()
    return int(bool(failed) or not cells)


if __name__ == "__main__":
    sys.exit(main())
