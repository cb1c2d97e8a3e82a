"""Compare training windows with sequences in one row (``pack: true``) and padded (``pack: false``), on one engine.

    python benchmarks/packing.py --method cpo --stage 0 --threads 1
    torchrun --nproc_per_node 2 benchmarks/packing.py --method cpo --stage 3 --threads 1

The same windows are computed in both ways, alternately, without optimizer steps. Of Online DPO, the passes of the
reference and of training are measured, without rollouts. The numbers of a line tell how many times as much padded
sequences take: tokens, forward units, CPU time and wall time. Forward units are the multiply-adds with weights: of the
layers for every token, of the head for every scored token. A pass with gradients counts four times, because it is
recomputed and its backward pass has twice as many. In brackets: the share of the units' ratio that the time reaches.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402

from alignment.data.batching import MicroBatches  # noqa: E402
from alignment.engines.collectives import gathered  # noqa: E402
from alignment.engines.phases import PhaseRecord, Phases  # noqa: E402
from alignment.engines.scoring import ScoringEngine  # noqa: E402
from alignment.references.engine import EngineReference  # noqa: E402
from alignment.run.ranks import rank, tell, world_size  # noqa: E402
from alignment.training.trainer import AlignmentTrainer  # noqa: E402
from benchmarks import ours  # noqa: E402
from benchmarks.jobs import METHODS, Job  # noqa: E402
from benchmarks.shapes import LAYERS, write_model  # noqa: E402

PASSES = ("reference", "kl", "train")  # the phases whose sequences are packed


class Meter(Phases):
    """Measures the passes of a window on this rank: ``wall`` and ``cpu`` seconds, ``tokens`` and forward ``units``."""

    def __init__(self, engines: list[ScoringEngine]) -> None:
        super().__init__(engines[0].device)
        self.found: Counter[str] = Counter()
        for engine in engines:
            model = engine.scorer.model
            head = model.get_output_embeddings().weight
            sizes = {id(each): getattr(each, "ds_numel", each.numel()) for each in model.parameters()}
            self._head = sizes.pop(id(head))
            self._layers = sum(sizes.values())  # norms and biases are negligible
            engine.scorer.register_forward_pre_hook(self._count)

    def _count(self, scorer: Any, given: tuple[Any, ...]) -> None:
        inputs, positions, _, _, _, blocks = given
        tokens = sum(rows * width for rows, width in blocks) if blocks else inputs["input_ids"].numel()
        passes = 4 if torch.is_grad_enabled() else 1
        self.found["tokens"] += passes * tokens
        self.found["units"] += passes * (tokens * self._layers + len(positions) * self._head)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[PhaseRecord]:
        """See :class:`Phases`."""
        with super().__call__(name) as record:
            wall, own = time.perf_counter(), time.process_time()
            yield record
            if name in PASSES:
                self.found["wall"] += time.perf_counter() - wall
                self.found["cpu"] += time.process_time() - own


def windows(trainer: AlignmentTrainer, count: int) -> list[dict[str, float]]:
    """Return, for each window, how many times as many units and seconds it takes padded, over all ranks."""
    assert trainer.data.train is not None and trainer.data.sampler is not None
    window_pass, data, sampler = trainer.engines.window_pass, trainer.data.train, trainer.data.sampler
    models, collate = window_pass.models, trainer.method.kind.collate
    engines: list[ScoringEngine] = [models.policy]
    if isinstance(models.reference, EngineReference):
        engines.append(models.reference.engine)
    meter = window_pass.phases = Meter(engines)
    ratios = []
    for number in range(count + 1):
        plan, taken = sampler.plan(0, number), {}
        for packs in (number % 2 == 0, number % 2 == 1):
            for engine in engines:
                engine.packs = packs
            batches = list(MicroBatches(collate, data.batched, plan, rank()))
            meter.found.clear()
            window_pass(plan, batches, data, train=True)
            trainer.engines.policy.discard()
            taken[packs] = sum(gathered(meter.found), Counter())
        if number:  # the first window warms up
            ratios.append({name: taken[False][name] / taken[True][name] for name in taken[True]})
    return ratios


def main(arguments: list[str] | None = None) -> None:
    """Print the medians over all windows, as one line of a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=list(METHODS), default="cpo")
    parser.add_argument("--stage", type=int, choices=[0, 2, 3], default=0)
    parser.add_argument("--windows", type=int, default=5, help="measured windows, after one to warm up (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory(prefix="packing-") as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        write_model(Path(folder) / "model", LAYERS)
        job = Job("ours", given.method, f"{folder}/model", "", f"{folder}/output", given.windows + 1, 1, given.stage)
        count = (given.windows + 1) * job.rows_of_a_step * int(os.environ.get("WORLD_SIZE", 1))
        rows = METHODS[given.method].rows(LAYERS, count, 0)
        trainer = ours.build(replace(job, max_length=1024), Dataset.from_list(rows))
        trainer.engines.build(given.windows + 1)
        ratios = windows(trainer, given.windows)
        trainer.close()
    names = ("tokens", "units", "cpu", "wall")
    tokens, units, cpu, wall = (statistics.median(each[name] for each in ratios) for name in names)
    where = f"{given.method} | stage {given.stage}, ranks: {world_size()}"
    tell(f"| {where} | {tokens:.2f} | {units:.2f} | {cpu:.2f} ({cpu / units:.0%}) | {wall:.2f} ({wall / units:.0%}) |")


if __name__ == "__main__":
    main()
