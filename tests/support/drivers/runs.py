"""Train the runs listed in a JSON file, one after another in one process per rank, for tests with real engines.

The file contains ``[{"name", "trainer", "model", "ref_model", "args", "train", "eval", "save"}]``: method, paths,
options and rows, and for some runs ``block_cost`` and ``together``. Each run's log and the plan of its windows are
written to ``NAME.json`` next to the file. Completions of Online DPO are not generated, but taken from ``canned.py``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from support.drivers.canned import EOS, completion

import alignment
from alignment.cli.guarded import guarded
from alignment.data import batching
from alignment.rollout.backend import Completion, RolloutRequest
from alignment.rollout.engine import RolloutEngine
from alignment.training.run_engines import RunEngines
from alignment.training.trainer import AlignmentTrainer

BLOCK_COST = batching._BLOCK_COST


def canned(engine: RolloutEngine, request: RolloutRequest) -> list[list[Completion]]:
    """Replace ``RolloutEngine.generate``."""
    numbers, results = range(request.num_generations), []
    for prompt in request.prompts:
        made = [completion(prompt, number, request.num_generations) for number in numbers]
        results.append([Completion(ids, ids[-1] == EOS) for ids in made])
    return results


def windows(trainer: AlignmentTrainer) -> list[list[dict[str, Any]]]:
    """Record the rows of every window trained on, with token ids, and the partner as an index into the window."""
    result = []
    for number in range(trainer.state.global_step):
        plan = trainer.data.sampler.plan(*divmod(number, trainer.data.sampler.steps_per_epoch))
        pairs = [p for micro in plan.micro_batches for own in micro for p in zip(own.rows, own.partners)]
        place = {row: index for index, (row, _) in enumerate(pairs)}
        rows = []
        for row, partner in pairs:
            rows.append({**trainer.data.train.dataset[row], "partner": place.get(partner)})
        result.append(rows)
    return result


def one_run(
    run: dict[str, Any], folder: Path, watched: Callable[[AlignmentTrainer], dict[str, Any]] = lambda trainer: {}
) -> None:
    """Train (and evaluate) once, and write the results, with the records of ``watched``."""
    # Blocks of rows are split to save padding; with tiny rows, only if a further pass is declared to cost nothing.
    batching._BLOCK_COST = run.get("block_cost", BLOCK_COST)
    if "together" in run:  # micro-batches in a pass of the reference, which a memory plan decides
        RunEngines._together = lambda *_: run["together"]  # type: ignore[method-assign]
    kind = run["trainer"]
    options = getattr(alignment, f"{kind}Config")(**run["args"])
    models = {"model": run["model"]} | ({"ref_model": run["ref_model"]} if run.get("ref_model") else {})
    trainer = getattr(alignment, f"{kind}Trainer")(
        **models, args=options, train_dataset=run.get("train"), eval_dataset=run.get("eval")
    )
    outcome: dict[str, Any] = watched(trainer)
    if run.get("train"):
        trainer.train()
        outcome["windows"] = windows(trainer)
    if run.get("eval"):
        outcome["evaluation"] = trainer.evaluate()
    if run.get("save"):
        trainer.save_model(run["save"])
    outcome["log"] = trainer.state.log_history
    trainer.close()
    if trainer.is_world_process_zero():
        (folder / f"{run['name']}.json").write_text(json.dumps(outcome))


def main() -> None:
    """Train all runs of the file."""
    RolloutEngine.generate = canned  # type: ignore[method-assign]
    mock.patch("alignment.training.run_page.draw_page").start()
    mock.patch("os.fsync").start()
    if "HF_ENDPOINT" in os.environ:  # read when the library was imported, before this process was forked
        values = {"ENDPOINT": os.environ["HF_ENDPOINT"], "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        mock.patch.multiple("huggingface_hub.constants", **values).start()
    spec = Path(sys.argv[1])
    for run in json.loads(spec.read_text()):
        one_run(run, spec.parent)


if __name__ == "__main__":
    sys.exit(guarded(main))
