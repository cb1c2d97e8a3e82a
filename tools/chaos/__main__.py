"""``make chaos``: kill runs a thousand times, at named points and at random events, and check every restart.

KTO at ZeRO stage 2 and Online DPO at stage 3 alternate, both on two ranks. Each run is killed several times and then
allowed to finish; its result must equal that of a run that was never killed. A failed run can be replayed by its
number, which also continues an interrupted command. Its folder is stored.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tools.chaos.plan import drawn
from tools.chaos.run import Attempt, Chaos
from tools.ranks.client import ROOT
from tools.trial import offline_runs


def main(argv: Sequence[str] | None = None) -> int:
    """Run chains until the number of kills is reached; return the exit status: 1 if a restart failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first run; with --kills 1, a replay")
    given = parser.parse_args(argv)
    made, number = list[Attempt](), given.first
    with offline_runs("chaos-") as (server, folder):
        try:
            chaos = Chaos(server, folder, ROOT / "outputs" / "chaos")
            while sum(one.killed for one in made) < given.kills:
                for one in chaos.run(drawn(given.seed, number)):
                    made.append(one)
                    print(one.said, flush=True)
                number += 1
        except KeyboardInterrupt:
            print(f"interrupted; continue with --first {number}")
    killed, failed = sum(one.killed for one in made), sum(bool(one.problems) for one in made)
    print(f"{killed} kills in {number - given.first} runs, {failed} failures")
    return int(bool(failed) or killed < given.kills)


if __name__ == "__main__":
    sys.exit(main())
