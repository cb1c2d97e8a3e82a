"""``make signals``: test every launcher, signal and process of ``expected.txt`` on real runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tools.ranks import RankServer
from tools.signals.judge import Seen
from tools.signals.plan import Cell, table
from tools.signals.run import Signals
from tools.trial import workspace


def main(argv: Sequence[str] | None = None) -> int:
    """Make the cells; return the exit status, 1 if one failed or was not made."""
    parser = argparse.ArgumentParser(prog="python -m tools.signals", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", default="", help="only cells whose names contain these words, for example --only 'torchrun TERM'"
    )
    words = set(parser.parse_args(argv).only.split())
    cells, server, made = table(), RankServer(), dict[Cell, Seen]()
    wanted = [cell for cell in cells if words <= set(cell.name.split())]
    with workspace("signals-") as folder:
        os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "cache"))
        os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        try:
            signals = Signals(server, folder)
            for number, cell in enumerate(wanted, 1):
                one = made[cell] = signals.make(cell, cells[cell])
                print(f"{number}/{len(wanted)} {cell.name}: {one.state} {one.signal} ({one.seconds} s)", flush=True)
                print("".join(f"  {problem}\n" for problem in one.problems), end="", flush=True)
        except KeyboardInterrupt:
            print("interrupted")
        finally:
            server.close()
    return int(len(made) < len(wanted) or any(one.problems for one in made.values()))


if __name__ == "__main__":
    sys.exit(main())
