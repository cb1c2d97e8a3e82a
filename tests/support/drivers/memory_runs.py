"""Measure the memory of the runs in a JSON file, one after another in one process per rank.

Usage: memory_runs.py SPEC, with ``{"library", "expert_bytes", "runs": [{"seed", "engine", "limits", "only_plan",
"options"}]}``. The last three, and ``expert_bytes``, may be left out. Rank N writes
``{"SEED-engine": {"planned", "peaks", "after"}}`` to ``rankN.json`` beside it: what the plan says, and bytes beyond
those in use before the model was loaded, at the peak and at the end of each phase. With an engine, the trainer runs
from loading to two steps and an evaluation. Without one, the model that the trainer loads computes one micro-batch
forward and backward.

To find what makes a peak, run it again with ``limits``, such as ``{"train": PEAK - 1}``: the operation that reaches
the peak raises an error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support import memory_predictions
from support.allocations import Allocations
from support.memory_cases import MemoryCase
from support.varlen import one_call
from torch.distributed import ProcessGroup

import alignment
from alignment.cli.guarded import guarded
from alignment.data.batching import packed
from alignment.engines.phases import PhaseRecord, Phases
from alignment.models import experts
from alignment.models.checking import why_not_packed
from alignment.models.loading import checkpoint_first, enable_checkpointing
from alignment.models.scorer import Scorer
from alignment.planning.plan import NotPlanned
from alignment.run.ranks import rank
from alignment.training import run_engines
from alignment.training.trainer import AlignmentTrainer


def reward(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """The reward function of Online DPO: no two completions of a prompt have the same."""
    return [float(sum(place * ord(letter) for place, letter in enumerate(text, 1)) % 997) for text in completions]


def trainer_of(case: MemoryCase, folder: Path, **options: Any) -> AlignmentTrainer:
    """Create the trainer of a case: models are planned and rows tokenized, but nothing is loaded."""
    made = getattr(alignment, f"{case.method}Config")(**case.options(folder, **options))
    rows = case.dataset()
    held = rows[: case.rows * case.ranks]
    trainer: AlignmentTrainer = getattr(alignment, f"{case.method}Trainer")(
        **case.make_models(folder / "model"), args=made, train_dataset=rows, eval_dataset=held
    )
    return trainer


@contextlib.contextmanager
def phases_of(allocations: Allocations) -> Iterator[None]:
    """Measure the phases that a run records, and the building of its engines."""
    recorded, build = Phases.__call__, run_engines.RunEngines.build

    @contextlib.contextmanager
    def measured(self: Phases, name: str) -> Iterator[PhaseRecord]:
        with allocations.phase(name if name == "evaluate" else self._prefix + name), recorded(self, name) as record:
            yield record

    def built(self: run_engines.RunEngines, steps: int | None) -> None:
        with allocations.phase("load"):
            build(self, steps)

    with mock.patch.object(Phases, "__call__", measured), mock.patch.object(run_engines.RunEngines, "build", built):
        yield


@contextlib.contextmanager
def uncounted_collectives(allocations: Allocations) -> Iterator[None]:
    """Do not count what gloo allocates on the calling thread: NCCL reads and writes the tensors that it is given."""
    kinds = ("all", "broadcast", "gather", "reduce", "scatter")
    names = [name for name in dir(ProcessGroup) if name.lstrip("_").startswith(kinds)]

    def wrapped(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            with allocations.uncounted():
                return collective(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch.object(ProcessGroup, name, wrapped(getattr(ProcessGroup, name))))
        yield


def with_engine(case: MemoryCase, trainer: AlignmentTrainer, allocations: Allocations) -> None:
    """Train two steps and evaluate."""
    allocations.begin()

    def first(model: Any, layers: int | None) -> tuple[int, int]:
        return checkpoint_first(model, case.checkpointed)

    checkpointing = mock.patch("alignment.training.checkpointing.checkpoint_first", first)
    with contextlib.closing(trainer), phases_of(allocations), checkpointing:
        trainer.train()
        assert trainer.state.global_step == 2
        trainer.evaluate()


def without_engine(case: MemoryCase, trainer: AlignmentTrainer, allocations: Allocations) -> None:
    """Load the model, and compute one micro-batch: without gradients, and forward and backward."""
    allocations.begin()
    with contextlib.closing(trainer):
        with allocations.phase("load"):
            scorer: Scorer = trainer.engines._scorer(trainer.planned.engines.policy)
        packs = case.packed and why_not_packed(scorer, torch.device("cpu")) is None
        if case.checkpointed:
            enable_checkpointing(scorer.model, {})
            checkpoint_first(scorer.model, case.checkpointed)
        batch = sequences_of(case, trainer)
        assert max(batch.sizes) == case.length
        batch = packed(batch, scorer.balancing_loss is None) if packs else batch
        given = batch.inputs, batch.positions, batch.targets, batch.longest, True, batch.blocks
        scorer.eval()
        with allocations.phase("evaluate"), torch.no_grad():
            scorer(*given)
        scorer.train()
        with allocations.phase("train"):
            output = scorer(*given)
            sums = output.scores.new_zeros(len(batch.lengths)).index_add(0, batch.segments, output.scores)
            loss = -torch.nn.functional.logsigmoid(0.1 * sums).sum()
            with scorer.attending():
                loss.backward()
            del output, sums, loss
        allocations.after["weights"] = sum(p.nbytes for p in scorer.parameters())
        allocations.after["gradients"] = sum(p.grad.nbytes for p in scorer.parameters() if p.grad is not None)
        allocations.after["packed"] = int(packs)


def sequences_of(case: MemoryCase, trainer: AlignmentTrainer) -> Any:
    """Return the sequences that the policy scores for the first micro-batch of a case's rows."""
    sampler, data = trainer.data.sampler, trainer.data.train
    assert sampler is not None and data is not None
    batch = trainer.method.kind.collate(data.batched, sampler.plan(0, 0), 0, rank())
    if case.method == "OnlineDPO":
        from alignment.data.kinds.pairs import collate_pairs

        completions = [[3 + number] * case.completion for number in range(2)]
        batch = collate_pairs(batch.rows, [(list(prompt), *completions) for prompt in batch.prompts], 0)
        return batch.pairs
    return trainer.method.scored(batch)


def main() -> None:
    """Measure all runs of the file."""
    mock.patch("alignment.training.run_page.draw_page").start()
    mock.patch("os.fsync").start()
    spec, found = Path(sys.argv[1]), {}
    given = json.loads(spec.read_text())
    if "expert_bytes" in given:
        mock.patch.object(experts, "EXPERT_BYTES", given["expert_bytes"]).start()
    for run in given["runs"]:
        case = MemoryCase.of(run["seed"])
        name = f"{case.seed}-{'engine' if run['engine'] else 'model'}"
        further = {} if run["engine"] else {"deepspeed": {"zero_optimization": {"stage": 0}}}
        trainer = trainer_of(case, spec.parent / name, **further, **run.get("options", {}))
        kind = memory_predictions.with_engine if run["engine"] else memory_predictions.without_engine
        try:
            found[name] = {"planned": kind(case, trainer)}
        except NotPlanned as reason:  # a measurement is of use without a plan
            found[name] = {"planned": str(reason)}
        if run.get("only_plan"):
            continue
        allocations = Allocations(Path(given["library"]), run.get("limits"))
        with allocations.active(), one_call(allocations.uncounted), uncounted_collectives(allocations):
            try:
                (with_engine if run["engine"] else without_engine)(case, trainer, allocations)
            except Exception:
                if run.get("limits"):
                    traceback.print_exc()
                    print("blocks in use:", allocations.refused()[:60], file=sys.stderr)
                raise
        found[name] |= {"peaks": allocations.peaks, "after": allocations.after}
    (spec.parent / f"rank{rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(guarded(main))
