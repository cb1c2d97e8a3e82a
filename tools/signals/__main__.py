"""``make signals``: test every launcher, signal and process of ``expected.txt`` on real runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tools.ranks import RankServer
from tools.signals.plan import table
from tools.signals.run import Signals
from tools.trial import workspace


def main(argv: Sequence[str] | None = None) -> int:
    """Make the cells; return the exit status, 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.signals", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", default="", help="only cells whose names contain these words, for example --only 'torchrun TERM'"
    )
    words = set(parser.parse_args(argv).only.split())
    wanted = {cell: expected for cell, expected in table().items() if words <= set(cell.name.split())}
    server, failed = RankServer(), 0
    with workspace("signals-") as folder:
        os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "cache"))
        os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        try:
            signals = Signals(server, folder)
            for number, (cell, expected) in enumerate(wanted.items(), 1):
                problems = signals.make(cell, expected)
                failed += bool(problems)
                print(
                    f"{number}/{len(wanted)} {cell.name}: {'FAILED' if problems else 'passed'}", *problems, sep="\n  "
                )
                sys.stdout.flush()
        finally:
            server.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
