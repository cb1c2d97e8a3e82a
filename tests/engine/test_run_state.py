"""The state of a run is complete: it suffices to resume, and covers everything that a step changes."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support.helpers import train_and_close
from support.whole_runs import completions, logged, make, make_models
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback

from alignment.checkpoint.folder import checkpoints
from alignment.checkpoint.run_state import RunState
from alignment.config.errors import TrainingError
from alignment.training.bad_steps import BadStep
from alignment.training.loop import TrainingLoop
from alignment.training.run_state import Totals
from alignment.training.trainer import AlignmentTrainer

pytestmark = pytest.mark.usefixtures("own_process_group")
METHODS = ("KTO", "CPO", "DPO", "SFT", "Reward", "OnlineDPO", "OnlineDPO-judge")
BRIEF = ("KTO", "OnlineDPO")
STEPS = 6  # two epochs
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_models(tmp_path_factory.mktemp("models"))


def state_of(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's state of the parts that all ranks share."""
    return json.loads((folder / "run_state.json").read_text())


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m == "KTO" else pytest.mark.ci) for m in METHODS])
def test_a_fresh_trainer_resumes_from_any_step(method: str, models: dict[str, str], tmp_path: Path) -> None:
    whole = train_and_close(make(method, models, tmp_path / "whole", **EVERY_STEP))
    # Within a log interval, at the end of an epoch, after an evaluation; all steps for the other methods.
    for step in (1, 3, 4) if method in BRIEF else range(1, STEPS):
        again = resumed(method, models, whole.output_dir, tmp_path / f"again {step}", step, **EVERY_STEP)
        assert logged(again) == logged(whole), f"after step {step}"
        assert completions(again) == completions(whole)
        for name in ("best_metric", "best_global_step", "num_input_tokens_seen", "epoch"):
            assert getattr(again.state, name) == getattr(whole.state, name), name
        for file in ("model.safetensors", "optimizer-00001-of-00001.safetensors"):
            last = f"checkpoint-{STEPS}/{file}"
            assert (again.output_dir / last).read_bytes() == (whole.output_dir / last).read_bytes()


def resumed(
    method: str, models: dict[str, str], done: Path, folder: Path, step: int, *callbacks: Any, **more: Any
) -> AlignmentTrainer:
    """Return a fresh trainer that was resumed from a step and finished, in a folder with later log lines."""
    random.seed(step)
    torch.manual_seed(step)
    shutil.copytree(done, folder / "out")
    for path in checkpoints(folder / "out"):
        if path.name != f"checkpoint-{step}":
            shutil.rmtree(path)
    return train_and_close(make(method, models, folder, *callbacks, **more), resume_from_checkpoint="latest")


class Stop(TrainerCallback):
    """Ends the run, or only the epoch, after the second step."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        setattr(control, self.flag, state.global_step == 2)


def test_an_epoch_that_a_callback_ended_stays_ended(models: dict[str, str], tmp_path: Path) -> None:
    whole = train_and_close(make("KTO", models, tmp_path / "whole", Stop("should_epoch_stop"), **EVERY_STEP))
    data = state_of(whole.output_dir / "checkpoint-2")["data"]
    assert (data["epoch"], data["step"]) == (1, 0)
    again = resumed("KTO", models, whole.output_dir, tmp_path / "again", 2, Stop("should_epoch_stop"), **EVERY_STEP)
    assert logged(again) == logged(whole)


def test_a_run_that_a_callback_ended_stays_ended(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it was killed before or after its message; it continues if requested."""
    rare = EVERY_STEP | {"logging_steps": 3}  # the summary has the metrics that were not due yet
    stopped = train_and_close(make("KTO", models, tmp_path / "stopped", Stop("should_training_stop"), **rare))
    again = resumed("KTO", models, stopped.output_dir, tmp_path / "again", 2, **rare)
    assert again.state.global_step == 2 and logged(again) == logged(stopped)
    assert "rewards/chosen" in logged(again)[-1] and "train_loss" in logged(again)[-1]
    assert "a callback ended this run at step 2 of 6" in capsys.readouterr().out
    whole = train_and_close(make("KTO", models, tmp_path / "whole", **rare))
    anyway = {**rare, "resume_anyway": True}
    further = resumed("KTO", models, stopped.output_dir, tmp_path / "further", 2, **anyway)
    assert logged(further)[-2:] == logged(whole)[-2:]


def test_a_run_resumes_from_a_rescued_checkpoint(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a non-finite loss, the checkpoint is that of the last good step, and the window is repeated."""
    rare = {"save_strategy": "steps", "save_steps": 100}
    whole = train_and_close(make("KTO", models, tmp_path / "whole", **rare))
    broken = make("KTO", models, tmp_path / "broken", **rare)
    update = TrainingLoop._update

    def failing(loop: TrainingLoop, *given: Any) -> Any:
        if loop.state.global_step == 4:
            torch.rand(3)
            raise BadStep("the loss of this window is nan", "non-finite loss")
        return update(loop, *given)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "_update", failing)
        with pytest.raises(TrainingError, match="weights of step 4 are saved in checkpoint-4"):
            train_and_close(broken)
    again = resumed("KTO", models, broken.output_dir, tmp_path / "again", 4, **rare)
    assert logged(again) == logged(whole)


# Everything that changes is restored --------------------------------------------------------------------------------

_BEFORE = ("", ".0", ".1", ".2", ".len")
# Attributes that a step changes and that a resume does not need, each with the reason.
EXCUSED = {
    "loop._step_seconds": "duration of this process's newest step",
    "loop._started": "a clock of this process; earlier seconds are in totals",
    "loop._before": "seconds before this process started, which are in totals",
    "loop.decision.0": "decided between any two steps; set at the last step",
    **{f"loop.best._before{part}": "of the newest evaluation, until its checkpoint is written" for part in _BEFORE},
    "trainer.context.identity.attempt": "counts how often a state was loaded",
    "trainer.engines._pass._series": "names weights in this process, so that a resumed run has names of its own",
    "trainer.engines._pass.log.table._size": "bytes of a file, unknown before its first write",
    **dict.fromkeys(
        (f"loop.progress.{name}" for name in ("_done", "_since", "_tokens")),
        "of the progress bar, which shows this process's speed",
    ),
    "trainer.data.sampler._order.0": "an epoch's order is a function of seed and epoch, computed on demand",
    "trainer.data.sampler._order.1": "the same",
}
_OWN = ("alignment.", "transformers.trainer_callback", "torch.optim.lr_scheduler")
_OPAQUE = (nn.Module, Optimizer, type)


def leaves(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yield every reachable value by its path; objects of other libraries by their identity."""
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        yield path, repr(value)
        return
    if isinstance(value, (Tensor, np.ndarray)):
        content = value.detach().float().cpu().numpy() if isinstance(value, Tensor) else value
        yield path, f"{type(value).__name__} {hash(content.tobytes())}"
        return
    if id(value) in seen or callable(value) and not hasattr(value, "state_dict"):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        yield f"{path}.len", str(len(value))
        for key, one in value.items():
            yield from leaves(one, f"{path}.{key}", seen)
    elif isinstance(value, (list, tuple, set)):
        yield f"{path}.len", str(len(value))
        for number, one in enumerate(value):
            yield from leaves(one, f"{path}.{number}", seen)
    elif type(value).__module__.startswith(_OWN) and not isinstance(value, _OPAQUE) and hasattr(value, "__dict__"):
        for name, one in vars(value).items():
            yield from leaves(one, f"{path}.{name}", seen)
    else:
        yield path, f"<{type(value).__name__} {id(value)}>"


def everything(loop: TrainingLoop, trainer: AlignmentTrainer) -> dict[str, str]:
    """Return everything reachable from the trainer and its loop, the process's random streams, and growing files."""
    found: dict[str, str] = {}
    for name in ("log.jsonl", "completions.jsonl"):
        file = trainer.output_dir / name
        found[f"file {name}"] = str(file.stat().st_size if file.exists() else 0)
    found["random python"] = str(hash(random.getstate()))
    found["random numpy"] = str(hash(np.random.get_state(legacy=False)["state"]["key"].tobytes()))  # type: ignore[call-overload]
    found["random torch"] = str(hash(torch.get_rng_state().numpy().tobytes()))
    seen: set[int] = {id(loop.context.run_state)}
    for path, value in (*leaves(trainer, "trainer", seen), *leaves(loop, "loop", seen)):
        found[path] = value
    return found


class Comparison:
    """Takes the state after the first step, restores it after the fifth, and finds the remaining differences."""

    def __init__(self, trainer: AlignmentTrainer) -> None:
        self.trainer = trainer
        self.changed: set[str] = set()
        self.left: dict[str, str] = {}

    def __call__(self, loop: TrainingLoop) -> None:
        step = loop.state.global_step
        if step == 1:
            self.state = json.dumps(loop.context.run_state.state())
            self.before = everything(loop, self.trainer)
        if step == 5:
            random.random(), np.random.rand(700), torch.rand(1)  # draw from every random stream
            after = everything(loop, self.trainer)
            now = loop.context.run_state.state()
            self.changed = {path for path in after if after[path] != self.before.get(path)}
            loop.context.run_state.load(*json.loads(self.state))
            loop.random.restore(1, 0)
            restored = everything(loop, self.trainer)
            for path in (restored.keys() | self.before.keys()) - EXCUSED.keys():
                if restored.get(path) != self.before.get(path):
                    self.left[path] = f"{self.before.get(path)} -> {restored.get(path)}"
            loop.context.run_state.load(*now)
            loop.random.restore(1, 0)


@pytest.mark.parametrize("method", ["KTO", "OnlineDPO"])
def test_everything_a_step_changes_is_in_the_state(
    method: str, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(method, models, tmp_path, max_steps=5)
    found, boundary = Comparison(trainer), TrainingLoop._between_steps

    def then(loop: TrainingLoop) -> None:
        boundary(loop)
        found(loop)

    monkeypatch.setattr(TrainingLoop, "_between_steps", then)
    train_and_close(trainer)
    assert {"trainer.state.global_step", "random torch", "file log.jsonl", "loop.totals.tokens"} <= found.changed
    assert found.left == {}


def test_unknown_parts_are_named() -> None:
    state = RunState()
    totals = state.register("totals", Totals())
    loaded = {"totals": {**vars(Totals()), "tokens": 7}, "gone": {}}
    assert state.unknown(loaded, {"lost": {}}) == ["gone", "lost"]
    state.load(loaded, {})
    assert totals.tokens == 7


def test_parts_of_each_rank_get_their_own_states() -> None:
    state, parts = RunState(), [mock.Mock(), mock.Mock()]
    for name, part in zip("ab", parts):
        state.register_on_each_rank(name, part)
        part.redistributed.side_effect = lambda former, rank: (former, rank)
    former = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    assert state.redistributed(former, 5) == {"a": ([1, 3], 5), "b": ([2, 4], 5)}
