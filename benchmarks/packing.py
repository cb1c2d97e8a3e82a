"""Compare training windows with sequences in one row (``pack: true``) and padded (``pack: false``), on one engine.

    python benchmarks/packing.py --method cpo --stage 0 --threads 1
    torchrun --nproc_per_node 2 benchmarks/packing.py --method cpo --stage 3 --threads 1

The same windows are computed in both ways, alternately, without optimizer steps. The CPU time is that of this rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402

from alignment.data.batching import MicroBatches, packed  # noqa: E402
from alignment.references.engine import EngineReference  # noqa: E402
from alignment.run.ranks import rank, tell, world_size  # noqa: E402
from alignment.training.trainer import AlignmentTrainer  # noqa: E402
from benchmarks import ours  # noqa: E402
from benchmarks.jobs import Job  # noqa: E402
from benchmarks.shapes import LAYERS, preference_rows, write_model  # noqa: E402


def windows(trainer: AlignmentTrainer, count: int) -> tuple[list[float], list[float], list[float]]:
    """Return, for each window, how many times as long it takes padded: tokens, seconds and seconds of CPU time."""
    assert trainer.data.train is not None and trainer.data.sampler is not None
    window_pass, data, sampler = trainer.engines.window_pass, trainer.data.train, trainer.data.sampler
    models, collate = window_pass.models, trainer.method.kind.collate
    reference = [models.reference.engine] if isinstance(models.reference, EngineReference) else []
    ratios: tuple[list[float], list[float], list[float]] = ([], [], [])
    for number in range(count + 1):
        plan = sampler.plan(0, number)
        taken = []
        for packs in (number % 2 == 0, number % 2 == 1):
            for engine in (models.policy, *reference):
                engine.packs = packs
            batches = list(MicroBatches(collate, data.batched, plan, rank()))
            tokens = 0
            for batch in batches:
                scored = trainer.method.scored(packed(batch, True) if packs else batch)
                shape = scored.inputs["input_ids"].shape
                blocks = () if models.policy.partitioned else scored.blocks
                tokens += sum(rows * width for rows, width in blocks) if blocks else shape[0] * shape[1]
            wall, own = time.perf_counter(), time.process_time()
            window_pass(plan, batches, data, train=True)
            taken.append((packs, tokens, time.perf_counter() - wall, time.process_time() - own))
            trainer.engines.policy.discard()
        if number:  # the first window warms up
            with_padding, without = sorted(taken)
            for place, found in enumerate(ratios, start=1):
                found.append(with_padding[place] / without[place])
    return ratios


def main() -> None:
    """Print the medians over all windows, as one line of a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["kto", "cpo", "dpo"], default="cpo")
    parser.add_argument("--stage", type=int, choices=[0, 2, 3], default=0)
    parser.add_argument("--windows", type=int, default=5, help="measured windows, after one to warm up (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory(prefix="packing-") as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        write_model(Path(folder) / "model", LAYERS)
        job = Job("ours", given.method, f"{folder}/model", "", f"{folder}/output", given.windows + 1, 1, given.stage)
        rows = preference_rows(LAYERS, (given.windows + 1) * job.rows_of_a_step * int(os.environ.get("WORLD_SIZE", 1)))
        trainer = ours.build(replace(job, max_length=1024), Dataset.from_list(rows))
        trainer.engines.build(given.windows + 1)
        tokens, wall, own = map(statistics.median, windows(trainer, given.windows))
        trainer.close()
    where = f"{given.method} | stage {given.stage}, ranks: {world_size()}"
    tell(f"| {where} | {tokens:.2f} | {wall:.2f} | {own:.2f} |")


if __name__ == "__main__":
    main()
