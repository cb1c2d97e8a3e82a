"""``make signals``: test every launcher, signal and process of ``expected.txt`` on real runs; print a Markdown table.

The command can be interrupted at any time and continues with the cells that have not passed with the current code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.ranks import RankServer
from tools.ranks.client import ROOT
from tools.signals.plan import table
from tools.signals.record import Record, fingerprint, markdown, wanted
from tools.signals.run import Signals
from tools.trial import workspace


def main(argv: Sequence[str] | None = None) -> int:
    """Make the remaining cells; return the exit status, 1 if a cell failed or was not made."""
    parser = argparse.ArgumentParser(prog="python -m tools.signals", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", default="", help="only cells whose names contain these words, for example --only 'torchrun TERM'"
    )
    parser.add_argument("--record", type=Path, default=ROOT / "outputs" / "signals.jsonl")
    given = parser.parse_args(argv)
    cells, record, server = table(), Record(given.record, fingerprint()), RankServer()
    left = wanted(cells, record, given.only)
    with workspace("signals-") as folder:
        os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "cache"))
        os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        try:
            signals = Signals(server, folder) if left else None
            for number, cell in enumerate(left, 1):
                assert signals is not None
                record.add(signals.make(cell, cells[cell]))
                one = record.cells[cell.name]
                print(f"{number}/{len(left)} {cell.name}: {one.state} {one.signal} ({one.seconds} s)", flush=True)
                print("".join(f"  {problem}\n" for problem in one.problems), end="", flush=True)
        except KeyboardInterrupt:
            print("interrupted; run the same command to continue")
        finally:
            server.close()
    print("\n".join(markdown(cells, record.cells)))
    return int(bool(wanted(cells, record, given.only)))


if __name__ == "__main__":
    sys.exit(main())
