"""Runs that are asked to stop save a checkpoint at any point, and a resumed run is bitwise equal."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.helpers import Acts, train_and_close
from support.whole_runs import completions, logged, make, make_models
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from alignment.checkpoint.folder import checkpoints
from alignment.checkpoint.writer import CheckpointWriter
from alignment.cli import train_job
from alignment.config.errors import RewardError, TrainingError
from alignment.rollout.generate import GenerateBackend
from alignment.run.activity import ACTIVITY
from alignment.run.status_file import RunStatus, read_status
from alignment.run.stop import REQUESTS, RunStopped, StopReason
from alignment.training import safe_points
from alignment.training import trainer as trainer_module
from alignment.training import trainer as trainers
from alignment.training.bad_steps import BadStep, BadSteps
from alignment.training.trainer import AlignmentTrainer

pytestmark = pytest.mark.usefixtures("own_process_group")
# One completion at a time gives a rollout several chunks; only the last step is saved otherwise.
RUN = {"save_strategy": "steps", "save_steps": 6, "eval_strategy": "epoch"}
SMALL_CHUNKS = {"rollout_batch_size": 1, "rollout_backend": "generate"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def kto(models: dict[str, str], tmp_path: Path) -> Callable[..., AlignmentTrainer]:
    """Create a trainer with the given callbacks and options; those of a test have the same folder."""
    return functools.partial(make, "KTO", models, tmp_path, **RUN)


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every safe point check for requests, however short the work in between."""
    monkeypatch.setattr(safe_points, "_EVERY_S", 0.0)
    REQUESTS.forget()


def terminate() -> None:
    """Send SIGTERM, like a launcher."""
    os.kill(os.getpid(), signal.SIGTERM)


def in_evaluation(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Request a stop during the run's n-th evaluation."""
    evaluate, count = trainers.evaluate, [0]

    def asked(*arguments: Any) -> dict[str, float]:
        count[0] += 1
        if count[0] == number:
            terminate()
        return evaluate(*arguments)

    monkeypatch.setattr(trainers, "evaluate", asked)


def in_rollout(monkeypatch: pytest.MonkeyPatch, chunk: int) -> Callable[[], bool]:
    """Request a stop during a rollout's n-th chunk; return a function that tells whether it was the last one."""
    generate, count = GenerateBackend.generate, [0]

    def asked(self: GenerateBackend, *arguments: Any) -> Any:
        count[0] += 1
        if count[0] == chunk:
            terminate()
        return generate(self, *arguments)

    monkeypatch.setattr(GenerateBackend, "generate", asked)
    return lambda: count[0] == chunk


def in_save(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Send a signal while a checkpoint is written."""
    written = CheckpointWriter._write

    def interrupted(self: CheckpointWriter, target: Path) -> None:
        os.kill(os.getpid(), number)
        written(self, target)

    monkeypatch.setattr(CheckpointWriter, "_write", interrupted)


def settings(method: str) -> dict[str, Any]:
    return {**RUN, **(SMALL_CHUNKS if method == "OnlineDPO" else {})}


@pytest.fixture(scope="module")
def wholes(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], AlignmentTrainer]:
    """Uninterrupted runs by method."""
    made: dict[str, AlignmentTrainer] = {}

    def whole(method: str) -> AlignmentTrainer:
        if method not in made:
            made[method] = train_and_close(make(method, models, tmp_path_factory.mktemp(method), **settings(method)))
        return made[method]

    return whole


def stopped(trainer: AlignmentTrainer, **how: Any) -> RunStopped:
    with pytest.raises(RunStopped) as caught:
        train_and_close(trainer, **how)
    return caught.value


def acting(event: str, step: int) -> Callable[[pytest.MonkeyPatch, AlignmentTrainer], None]:
    return lambda _, trainer: trainer.add_callback(Acts(event, step, terminate))


# The request, the resulting checkpoint, and what a resume does first.
PLACES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch, AlignmentTrainer], Any], int, list[str]]] = {
    "after-a-step": ("KTO", acting("on_step_end", 2), 2, []),
    "before-a-step": ("KTO", acting("on_step_begin", 2), 2, []),
    "between-micro-batches": ("KTO", acting("on_substep_end", 4), 4, []),
    "in-an-evaluation": ("KTO", lambda patch, _: in_evaluation(patch, 1), 3, ["evaluate", "save"]),
    "in-the-last-evaluation": ("KTO", lambda patch, _: in_evaluation(patch, 2), 6, ["evaluate", "save"]),
    "before-an-evaluation": ("KTO", acting("on_epoch_end", 3), 3, ["evaluate", "save"]),
    "in-a-rollout": ("OnlineDPO", lambda patch, _: in_rollout(patch, 18), 1, []),
    "in-the-rollout-of-an-evaluation": ("OnlineDPO", lambda patch, _: in_rollout(patch, 30), 3, ["evaluate", "save"]),
}


BRIEF = ("after-a-step", "in-an-evaluation")


@pytest.mark.parametrize("place", [pytest.param(p, marks=() if p in BRIEF else pytest.mark.ci) for p in PLACES])
def test_stopping_at_any_point(
    place: str,
    models: dict[str, str],
    wholes: Callable[[str], AlignmentTrainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method, ask, step, due = PLACES[place]
    whole = wholes(method)
    with monkeypatch.context() as patch:
        trainer = make(method, models, tmp_path, **settings(method))
        was_last = ask(patch, trainer)
        error = stopped(trainer)
        assert was_last is None or was_last(), "nothing is generated after the request"
    assert (error.code, error.reason) == (85, StopReason.SIGTERM)
    assert f"preempted by SIGTERM after step {step}: checkpoint-{step} is complete" in str(error)
    assert [path.name for path in checkpoints(trainer.output_dir)] == [f"checkpoint-{step}"]
    saved = json.loads((trainer.output_dir / f"checkpoint-{step}" / "run_state.json").read_text())
    assert saved["boundary"]["due"] == due
    status = read_status(trainer.output_dir)
    assert (status.state, status.signal, status.step) == ("preempted", "SIGTERM", step)
    assert status.checkpoint == f"checkpoint-{step}"
    again = train_and_close(make(method, models, tmp_path, **settings(method)), resume_from_checkpoint="latest")
    assert logged(again) == logged(whole) and completions(again) == completions(whole)
    for file in ("model.safetensors", "optimizer-00001-of-00001.safetensors"):
        last = f"checkpoint-6/{file}"
        assert (again.output_dir / last).read_bytes() == (whole.output_dir / last).read_bytes()
    status = read_status(again.output_dir)
    assert (status.state, status.signal, status.attempt) == ("finished", None, 2)
    assert status.resumed_from == f"checkpoint-{step}"


def test_a_second_signal_does_not_interrupt_the_save(
    kto: Callable[..., AlignmentTrainer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Launchers and schedulers send several signals, and the second may arrive during the save.

    A script that calls ``train()`` exits without a traceback, so the run itself prints how to resume.
    """
    in_save(monkeypatch, signal.SIGUSR1)
    trainer = kto(Acts("on_substep_end", 4, terminate))
    assert "checkpoint-4 is complete" in str(stopped(trainer))
    last = "checkpoint-4 is complete; call train(resume_from_checkpoint=True) to resume\n"
    assert last in capsys.readouterr().out
    assert [path.name for path in checkpoints(trainer.output_dir)] == ["checkpoint-4"]
    status = read_status(trainer.output_dir)
    assert (status.state, status.signal) == ("preempted", "SIGTERM")


@pytest.mark.ci
def test_an_error_counts_although_a_stop_is_pending(
    kto: Callable[..., AlignmentTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(self: BadSteps, loss: float) -> None:
        if len(self.state_dict()["losses"]) == 2:
            raise BadStep("too high", "loss spike")

    in_save(monkeypatch, signal.SIGTERM)
    monkeypatch.setattr(BadSteps, "check", bad)
    with pytest.raises(TrainingError, match="too high. The weights of step 2 are saved in checkpoint-2$"):
        train_and_close(kto())


@pytest.mark.ci
def test_a_signal_after_the_last_step_stops_the_next_call_only(
    kto: Callable[..., AlignmentTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the report, in the final result, and in a callback at the end."""
    written = trainer_module.write_report

    def interrupted(*args: Any, **kwargs: Any) -> None:
        terminate()
        written(*args, **kwargs)

    monkeypatch.setattr(trainer_module, "write_report", interrupted)
    trainer = kto(Acts("on_train_end", 6, terminate))
    trainer.train()
    status = read_status(trainer.output_dir)
    assert (status.state, status.signal) == ("finished", None)
    assert (trainer.output_dir / "report.md").exists()
    with pytest.raises(RunStopped, match="preempted by SIGTERM"):
        trainer.evaluate()
    trainer.evaluate()
    trainer.close()


@pytest.mark.ci
def test_a_signal_while_the_model_loads(kto: Callable[..., AlignmentTrainer], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = kto()
    steps: list[int] = []

    def build(_: int) -> None:
        steps.append(ACTIVITY.step)
        terminate()
        time.sleep(20)

    monkeypatch.setattr(trainer.engines, "build", build)
    monkeypatch.setattr(ACTIVITY, "step", 500)  # of an earlier run in this process
    error = stopped(trainer)
    assert steps == [0] and REQUESTS.reason is None
    assert "preempted by SIGTERM in phase load; no training step was in progress" in str(error)
    status = read_status(trainer.output_dir)
    assert (status.state, status.signal, status.error) == ("preempted", "SIGTERM", None)


class Counts(TrainerCallback, ExportableState):
    """Counts the checkpoints saved because of the run's options."""

    def __init__(self, saves: int = 0) -> None:
        self.saves = saves

    def on_save(self, *_: Any, **__: Any) -> None:
        self.saves += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"saves": self.saves}}


@pytest.mark.ci
@pytest.mark.parametrize("step", [3, 4])
def test_callbacks_are_notified_of_saves_as_in_an_uninterrupted_run(
    step: int, kto: Callable[..., AlignmentTrainer]
) -> None:
    """The checkpoint of a stop does not count."""
    counts = Counts()
    for resumes in (False, True):
        counts = Counts()
        trainer = kto(counts, save_steps=2)
        if resumes:
            train_and_close(trainer, resume_from_checkpoint="latest")
        else:
            trainer.add_callback(Acts("on_step_end", step, terminate))
            stopped(trainer)
    assert counts.saves == 3


@pytest.mark.ci
def test_a_request_at_the_last_step_changes_nothing(kto: Callable[..., AlignmentTrainer]) -> None:
    """If no evaluation remains, the run is finished."""
    trainer = kto(eval_strategy="no")
    trainer.pop_callback(EarlyStoppingCallback)
    trainer.add_callback(Acts("on_step_end", 6, terminate))
    train_and_close(trainer)
    assert trainer.state.global_step == 6


def test_a_stop_in_the_evaluation_of_the_second_set(
    kto: Callable[..., AlignmentTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume evaluates both sets, although the callbacks have heard of the first one."""

    def trainer() -> AlignmentTrainer:
        made = kto()
        (data,) = made.data.eval.values()
        made.data.eval = {"": data, "b": data}
        return made

    with monkeypatch.context() as patch:
        in_evaluation(patch, 2)
        stopped(trainer())
    resumed = train_and_close(trainer(), resume_from_checkpoint=True)
    names = {name for entry in resumed.state.log_history if entry["step"] == 3 for name in entry}
    assert {"eval_loss", "eval_b_loss"} <= names


class Evaluates(TrainerCallback):
    """Evaluates at an event of the step after the second one; ``ask`` requests a stop before."""

    def __init__(self, trainer: AlignmentTrainer, event: str, ask: Callable[[], None]) -> None:
        self.trainer, self.ask, self.done = trainer, ask, False
        setattr(self, event, self.hear)

    def hear(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step in (2, 3) and not self.done:
            self.done = True
            self.ask()
            self.trainer.evaluate()


@pytest.mark.parametrize("event", ["on_optimizer_step", pytest.param("on_step_end", marks=pytest.mark.ci)])
def test_an_evaluation_of_a_callback_is_not_abandoned(event: str, models: dict[str, str], tmp_path: Path) -> None:
    """The stop waits for the end of the step: no step is taken twice after a resume, and nothing due is lost."""

    def trainer(folder: str, ask: Callable[[], None]) -> AlignmentTrainer:
        made = make("KTO", models, tmp_path / folder, **RUN)
        made.add_callback(Evaluates(made, event, ask))
        return made

    whole = train_and_close(trainer("whole", lambda: None))
    halted = trainer("stopped", terminate)
    step = 3 if event == "on_optimizer_step" else 2
    assert f"after step {step}: checkpoint-{step} is complete" in str(stopped(halted))
    again = train_and_close(make("KTO", models, tmp_path / "stopped", **RUN), resume_from_checkpoint="latest")
    assert logged(again) == logged(whole)
    last = "checkpoint-6/model.safetensors"
    assert (again.output_dir / last).read_bytes() == (whole.output_dir / last).read_bytes()


def test_a_reward_that_fails_in_a_callback_saves_nothing(kto: Callable[..., AlignmentTrainer]) -> None:
    """In the middle of a step, the weights may be those of the next one."""

    def fail() -> None:
        raise RewardError("the judge is gone")

    trainer = kto(Acts("on_optimizer_step", 2, fail))
    with pytest.raises(TrainingError, match="^on_optimizer_step: the judge is gone$"):
        train_and_close(trainer)
    assert not checkpoints(trainer.output_dir)


def test_the_stop_file(kto: Callable[..., AlignmentTrainer], capsys: pytest.CaptureFixture[str]) -> None:
    """It ends the run like Ctrl-C; a file from before the start is removed."""
    trainer = kto()
    stop = trainer.output_dir / "STOP"
    stop.parent.mkdir(exist_ok=True)
    stop.touch()
    trainer.add_callback(Acts("on_step_end", 3, stop.touch))
    error = stopped(trainer)
    assert f"{stop}: removed, since it is from an earlier run" in capsys.readouterr().out
    assert (error.code, error.reason) == (130, StopReason.STOP)
    status = read_status(trainer.output_dir)
    assert (status.state, status.signal, status.step) == ("stopped", "STOP", 3)


@pytest.mark.ci
def test_a_run_that_saves_nothing(kto: Callable[..., AlignmentTrainer]) -> None:
    trainer = kto(Acts("on_step_end", 2, terminate), save_strategy="no")
    assert "nothing was saved, because save_strategy is no" in str(stopped(trainer))
    assert not checkpoints(trainer.output_dir)


@pytest.mark.ci
def test_a_request_before_the_first_step(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the initial policy's rollout for an evaluation set, there is nothing to save."""
    trainer = make("OnlineDPO", models, tmp_path, **settings("OnlineDPO"))
    in_rollout(monkeypatch, 2)
    assert "after step 0: no step was completed" in str(stopped(trainer))


def test_signal_handlers_are_restored(kto: Callable[..., AlignmentTrainer]) -> None:
    """A user's handler stays in place, and is called."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        trainer = kto(Acts("on_step_end", 1, lambda: os.kill(os.getpid(), signal.SIGUSR1)), max_steps=2)
        train_and_close(trainer)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1] and trainer.state.global_step == 2
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.ci
def test_attempts_without_progress_are_counted(kto: Callable[..., AlignmentTrainer]) -> None:
    """Such a run fails before it saves a newer checkpoint than the one it resumed from."""

    def status(step: int, resumes: bool) -> RunStatus:
        trainer = kto(Acts("on_step_end", step, lambda: 1 / 0), save_steps=2)
        with pytest.raises(ZeroDivisionError):
            train_and_close(trainer, resume_from_checkpoint="latest" if resumes else None)
        found = read_status(trainer.output_dir)
        assert found.state == "failed" and "division by zero" in str(found.error)
        return found

    seen = [status(*each) for each in ((1, False), (1, True), (3, True), (3, True), (3, True), (5, True))]
    assert [each.stalled for each in seen] == [1, 2, 0, 1, 2, 0]
    assert [each.attempt for each in seen] == [1, 2, 3, 4, 5, 6]
    assert [each.resumed_from for each in seen] == ["", "", "", "checkpoint-2", "checkpoint-2", "checkpoint-2"]


@pytest.mark.ci
def test_an_attempt_that_stops_immediately_makes_no_progress(
    kto: Callable[..., AlignmentTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first step takes longer than the attempt lasts, and the existing checkpoint is not its own."""

    def status(job: str, step: int, event: str) -> tuple[int, str]:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        trainer = kto(Acts(event, step, terminate))
        stopped(trainer, resume_from_checkpoint="latest")
        found = read_status(trainer.output_dir)
        return found.stalled, found.checkpoint

    first = status("17", 2, "on_step_end")
    seen = [status(job, 2, "on_substep_end") for job in ("17", "17", "18")]
    assert first == (0, "checkpoint-2") and seen == [(1, "checkpoint-2"), (2, "checkpoint-2"), (1, "checkpoint-2")]
    assert status("18", 3, "on_step_end") == (0, "checkpoint-3")
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert read_status(tmp_path / "out").attempt == 5
    assert [line["attempt"] for line in log if line.get("event") == "resume"] == [5], "as counted in the log"


@pytest.mark.ci
def test_the_model_is_saved_before_the_final_evaluation(
    kto: Callable[..., AlignmentTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Ctrl-C ends that evaluation after the weights were written."""
    trainer = kto(eval_strategy="no")
    trainer.pop_callback(EarlyStoppingCallback)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "evaluate", interrupted)
    monkeypatch.setattr(train_job, "build_trainer", lambda options: trainer)
    with pytest.raises(KeyboardInterrupt):
        train_job.run(trainer.args)
    trainer.close()
    assert (trainer.output_dir / "model.safetensors").exists()
