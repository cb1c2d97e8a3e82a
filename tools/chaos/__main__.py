"""``make chaos``: kill runs a thousand times, at named points and at random moments, and check every restart.

KTO at ZeRO stage 2 and Online DPO at stage 3 alternate, both on two ranks. Each run is killed several times and then
allowed to finish; its result must equal that of a run that was never killed. The command can be interrupted at any
time and continues when it is called again. The folder of a failed run is stored next to the record, and the run can be
replayed by its number: with the same points, and with the same moments as far as the machine's load allows.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.chaos.plan import drawn
from tools.chaos.record import Record
from tools.chaos.run import Attempted, Chaos
from tools.ranks import RankServer
from tools.ranks.client import ROOT
from tools.trial import workspace


def main(argv: Sequence[str] | None = None) -> int:
    """Run chains until the number of kills is reached; return the exit status: 1 if a restart failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=int, help="number of a run to replay; nothing is recorded")
    parser.add_argument("--record", type=Path, default=ROOT / "outputs" / "chaos.jsonl")
    given = parser.parse_args(argv)
    record = Record(given.record, given.seed)
    server = RankServer()
    with workspace("chaos-") as folder:
        os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "cache"))
        os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        try:
            chaos = Chaos(server, folder, given.record.with_suffix(""))
            if given.replay is not None:
                return int(any(attempted.problems for attempted in chaos.run(drawn(given.seed, given.replay), _show)))
            _until(chaos, record, given.kills)
        except KeyboardInterrupt:
            print("interrupted; run the same command to continue")
        finally:
            server.close()
    print("\n".join(record.summary()))
    return int(bool(record.failures) or record.kills < given.kills)


def _until(chaos: Chaos, record: Record, kills: int) -> None:
    """Run chains that are not in the record until it has this number of kills."""
    number = 0
    while record.kills < kills:
        chain = drawn(record.seed, number)
        number += 1
        if chain.name in record.closed:
            continue

        def note(attempted: Attempted) -> None:
            record.add(attempted)
            _show(attempted)

        record.close(chain.name, chaos.run(chain, note))
        print(f"{record.kills} of {kills} kills, {len(record.failures)} failures", flush=True)


def _show(attempted: Attempted) -> None:
    what = attempted.kill or "left alone"
    became = f"killed in {attempted.place}" if attempted.killed else "finished"
    start = f"{attempted.chain}.{attempted.number} {attempted.method} from step {attempted.resumed_from}"
    print(f"{start}: {what}: {became} ({attempted.seconds:.1f} s)", flush=True)
    for problem in attempted.problems:
        print(f"  {problem}", flush=True)
    if attempted.report:
        print(attempted.report, flush=True)


if __name__ == "__main__":
    sys.exit(main())
