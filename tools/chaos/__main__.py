"""``make chaos``: kill runs a thousand times, at named points and at random moments, and check every restart.

KTO at ZeRO stage 2 and Online DPO at stage 3 alternate, both on two ranks. Each run is killed several times and then
allowed to finish; its result must equal that of a run that was never killed. To continue an interrupted command, pass
the number of the next run. The folder of a failed run is stored, and the run can be replayed by its number: with the
same points, and with the same moments as far as the machine's load allows.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence

from tools.chaos.plan import drawn
from tools.chaos.run import Attempted, Chaos
from tools.ranks import RankServer
from tools.ranks.client import ROOT
from tools.trial import workspace


def main(argv: Sequence[str] | None = None) -> int:
    """Run chains until the number of kills is reached; return the exit status: 1 if a restart failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first run; with --kills 1, a replay")
    given = parser.parse_args(argv)
    server, told = RankServer(), list[Attempted]()
    with workspace("chaos-") as folder:
        os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "cache"))
        os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        try:
            chaos, number = Chaos(server, folder, ROOT / "outputs" / "chaos"), given.first
            while sum(one.killed for one in told) < given.kills:
                told += chaos.run(drawn(given.seed, number), _show)
                number += 1
        except KeyboardInterrupt:
            print(f"interrupted; continue with --first {number}")
        finally:
            server.close()
    killed, failed = [one for one in told if one.killed], [one for one in told if one.problems]
    print(f"{len(killed)} kills in {sum(one.number == 1 for one in told)} runs, {len(failed)} failures")
    for name, count in Counter(one.point for one in killed).most_common():
        print(f"{count:5} {name}")
    return int(bool(failed) or len(killed) < given.kills)


def _show(attempted: Attempted) -> None:
    what = attempted.kill or "left alone"
    became = f"killed in {attempted.place}" if attempted.killed else "finished"
    start = f"{attempted.chain}.{attempted.number} {attempted.method} from step {attempted.resumed_from}"
    print(f"{start}: {what}: {became} ({attempted.seconds:.1f} s)", flush=True)
    for problem in attempted.problems:
        print(f"  FAILED: {problem}", flush=True)
    if attempted.report:
        print(attempted.report, flush=True)


if __name__ == "__main__":
    sys.exit(main())
