"""The training loop: window, forward and backward, step, log, evaluate, save.

A checkpoint is the last act of a step: everything that callbacks requested at this step and at the end of the epoch
has been done by then, so that a resumed run has nothing to catch up on.

transformers' callbacks decide when to log, evaluate, save and stop: its DefaultFlowCallback reads the options.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tqdm import tqdm
from transformers.trainer_utils import TrainOutput

from alignment.checkpoint.best import BestModel
from alignment.checkpoint.folder import checkpoint_folder
from alignment.checkpoint.writer import CheckpointWriter
from alignment.config.errors import RewardError, TrainingError
from alignment.data.batching import AnyBatch
from alignment.data.windows import WindowCounts, WindowPlan, WindowSampler
from alignment.internals.torch import schedule_may_go_first
from alignment.reporting.metrics import MetricHistory, means
from alignment.reporting.progress import Progress, say
from alignment.run.activity import ACTIVITY
from alignment.run.ranks import rank, tell, world_size
from alignment.run.stop import REQUESTS, STOP_FILE, Cut
from alignment.training.bad_steps import BadStep, BadSteps, Overflows
from alignment.training.callbacks import Decision
from alignment.training.context import RunContext
from alignment.training.data import PreparedData, total_steps
from alignment.training.method import Items
from alignment.training.run_engines import RunEngines
from alignment.training.run_manifest import start_event
from alignment.training.run_state import AFTER_EPOCH, AFTER_STEP, Boundary, RandomAtStart, Totals
from alignment.training.safe_points import agreed_reason
from alignment.training.stopping import end_run, notice_too_short
from alignment.training.window import WindowResult
from alignment.training.window_loader import windows_of_epoch

_NOTHING = WindowResult({}, WindowCounts(0, 0, 0, 0, 0))  # of a window that is skipped


class StepResult(NamedTuple):
    """What a step gave: its window, the norm of the gradient (0 if skipped), and the learning rate."""

    window: WindowResult
    grad_norm: float
    learning_rate: float


class TrainingLoop:
    """Trains on the windows of a run, starting at the current state.

    Args:
        context: the run.
        engines: its engines.
        data: the training data.
        sampler: the windows of the training data.
        evaluate: evaluates, logs and notifies the callbacks; returns all metrics by name.
        rehearse: computes the largest micro-batches of the next steps, and leaves no trace.
    """

    def __init__(
        self,
        context: RunContext,
        engines: RunEngines,
        data: PreparedData,
        sampler: WindowSampler,
        evaluate: Callable[[], dict[str, float]],
        rehearse: Callable[[int], None],
    ) -> None:
        self.context, self.engines, self.data, self.sampler = context, engines, data, sampler
        self.evaluate, self.rehearse = evaluate, rehearse
        self.args, self.state, self.events = context.args, context.state, context.events
        self.total_steps = total_steps(context.args, sampler)
        self.best = BestModel(context.args, context.state)
        register = context.run_state.register
        self.history, self.totals = register("history", MetricHistory()), register("totals", Totals())
        self.boundary = register("boundary", Boundary())
        self.random = context.run_state.register_on_each_rank("random", RandomAtStart(context.args.seed))
        register("data", sampler)
        record = context.log_file.write
        self.bad_steps = register("bad_steps", BadSteps(self.args, data.sources, say, record))
        self.overflows = register("overflows", Overflows())
        self.decision = Decision()
        self._actions = {
            "log": self._log_if_due,
            "evaluate": self._evaluate_if_due,
            "end epoch": self._end_epoch_if_due,
            "save": self._save_if_due,
            "announce save": self._announce_save,
        }
        self._step_seconds = 0.0  # duration of the newest step
        self._saves = 0  # number of saves in this process
        self._fatal: str | None = None  # the error that ends the run after this step

    def run(
        self,
        evaluation: Iterable[tuple[WindowPlan, Sequence[AnyBatch], PreparedData]],
        writer: CheckpointWriter,
        resumed: dict[str, Any] | None = None,
    ) -> TrainOutput:
        """Train to the last step; return transformers' ``TrainOutput``.

        Args:
            evaluation: the windows of the evaluation sets.
            writer: writes checkpoints.
            resumed: the record of the log about the checkpoint that the run resumes from; None for a new run.
        """
        self.writer, self.resumed = writer, resumed
        self._open_log()
        args, state = self.args, self.state
        stop_file = self.context.output_dir / STOP_FILE if self.context.is_first else None
        device = self.engines.window_pass.device
        self.progress = Progress(self.total_steps, args.method, args.disable_tqdm, device, done=state.global_step)
        # Includes the final save, which a launcher's second signal must not interrupt.
        with contextlib.closing(self.progress), REQUESTS.deferred(stop_file), ACTIVITY("training"):
            try:
                self._before_first_step(evaluation)
                for plan, batches in self._windows():
                    began = time.monotonic()
                    self._before_step(plan)
                    self._after_step(plan, self._update(plan, batches))
                    self._step_seconds = time.monotonic() - began
                    self._between_steps()
            except Cut:  # within a window, which is repeated after a resume, or before the first one
                self._leave()
            except (BadStep, RewardError) as error:  # raised on every rank, with valid weights
                kind = TrainingError if isinstance(error, BadStep) else RewardError
                raise kind(f"step {state.global_step + 1}: {error}{self._rescue()}") from error
            return self._finish()

    # A step ---------------------------------------------------------------------------------------------------------

    def _windows(self) -> Iterator[tuple[WindowPlan, Sequence[AnyBatch]]]:
        """Yield the remaining windows, from the position of the sampler, which each step advances."""
        sampler = self.sampler
        while self._goes_on():
            last = min(sampler.steps_per_epoch, sampler.step + self.total_steps - self.state.global_step)
            for plan, batches in windows_of_epoch(self.context, self.data, sampler, last):
                yield plan, batches
                if sampler.step == 0 or self.boundary.ends:  # a callback may end the epoch early
                    break

    def _before_step(self, plan: WindowPlan) -> None:
        """Notify the callbacks of a step; until its end, the state of the run is that from before it."""
        self.random.hold()
        if plan.step == 0:
            self.events("on_epoch_begin")
        self.events("on_step_begin")

    def _after_step(self, plan: WindowPlan, taken: StepResult) -> None:
        """Count a step that was taken, and notify the callbacks."""
        state, items, counts = self.state, taken.window.items, taken.window.counts
        self.sampler.advance()
        state.global_step += 1
        state.epoch = plan.epoch + (plan.step + 1) / self.sampler.steps_per_epoch
        self.totals.add(items, counts)
        if self.args.include_num_input_tokens_seen:
            state.num_input_tokens_seen = self.totals.tokens
        self.history.add(items)
        norm, rate = taken.grad_norm, taken.learning_rate
        self.totals.last = {"grad_norm": norm, "learning_rate": rate, **self._failures}
        self._check_reduced(counts, items)
        self.progress.advance(means(items), counts.sequence_tokens)
        self.events("on_step_end")
        self.random.release()

    def _update(self, plan: WindowPlan, batches: Sequence[AnyBatch]) -> StepResult:
        """Take an optimizer step: compute the gradient of a window and apply it.

        A window that is skipped, because of a bad step or because it has nothing to train on, only advances the
        schedule.

        Raises:
            BadStep: if no update was made, and the run must end; on every rank.
            Cut: if the run was asked to stop; on every rank, before any weight has changed.
        """
        policy, step, result = self.engines.policy, self.state.global_step + 1, _NOTHING
        learning_rate = policy.learning_rate
        try:
            if not self.bad_steps.omits(plan, step):
                result = self.engines.window_pass(
                    plan, batches, self.data, train=True, between=lambda: self.events("on_substep_end")
                )
            if result.counts.rows:
                loss = result.items["loss"][0]
                self.bad_steps.check(loss)
                grad_norm = self._apply_gradient()
                self.bad_steps.good(loss)
                return StepResult(result, grad_norm, learning_rate)
        except BadStep as fault:
            self.bad_steps.skip(fault, plan, step)
            if not fault.discarded:
                policy.discard()
            result = _NOTHING
        with schedule_may_go_first():
            policy.scheduler.step()
        return StepResult(result, 0.0, learning_rate)

    def _apply_gradient(self) -> float:
        """Update the weights with the accumulated gradient; return its norm.

        If it overflowed in fp16, the window is computed again at a lower loss scale.
        """
        policy = self.engines.policy
        self.events("on_pre_optimizer_step")
        with self.context.phases("step"):
            grad_norm = policy.step()
        while not math.isfinite(grad_norm) and policy.scales_loss:
            self.overflows.lower_scale(policy, self.state.global_step + 1, say, self.context.log_file.write)
            self.engines.window_pass.repeat()
            with self.context.phases("step"):
                grad_norm = policy.step()
        if not math.isfinite(grad_norm):
            raise BadStep(
                f"the gradient norm is {grad_norm} although the loss is finite; no update was made. Likely causes: a "
                "learning_rate that is too high, or a value that overflows in the backward pass",
                "non-finite gradient",
                discarded=True,
            )
        self.events("on_optimizer_step")
        return grad_norm

    def _check_reduced(self, counts: WindowCounts, items: Items) -> None:
        """Report and count a window that was computed in a reduced form."""
        method, totals = self.context.method, self.totals
        self._fatal = None
        reduced = method.check_window(counts, items) if items else None
        if reduced is not None:
            totals.reduced_windows, totals.reduced_in_a_row = totals.reduced_windows + 1, totals.reduced_in_a_row + 1
            say(f"step {self.state.global_step}: {reduced}")
            self._fatal = method.check_reduced(totals.reduced_in_a_row, items)
        elif items:
            totals.reduced_in_a_row = 0

    # Between two steps ----------------------------------------------------------------------------------------------

    def _between_steps(self) -> None:
        """Log, evaluate, end the epoch (and log and evaluate again) and save, as far as each is due.

        The state of the run is complete before and after each of these actions. A checkpoint contains those that are
        still due, and a resume does them first.
        """
        self._show_status()
        self._decide()
        self.boundary.due = list(AFTER_STEP)
        self._complete()
        if self._fatal is not None:  # on every rank, which have the same metrics
            raise TrainingError(f"step {self.state.global_step}: {self._fatal}{self._rescue()}")
        if self.decision.leave is not None and self._goes_on():
            self._leave()

    def _complete(self) -> None:
        """Do what is due, in order."""
        while self.boundary.due:
            self._actions[self.boundary.due.pop(0)]()

    def _decide(self) -> None:
        """Combine the requests of all ranks' callbacks; collective."""
        self.decision = self.events.decide()
        # transformers' own callback also stops at the last step, which is not an early end.
        self.boundary.ends = self.decision.stop and self.state.global_step < self.total_steps

    def _log_if_due(self) -> None:
        ends = self._stops() and self.args.logging_strategy == "steps"
        if self.decision.log or (ends and self.history):
            self._log(asked=self.decision.log)
            self._decide()

    def _evaluate_if_due(self) -> None:
        if not self.decision.evaluate:
            return
        try:
            if self.decision.leave is not None:
                raise Cut
            self._evaluate()
        except (Cut, RewardError) as error:  # a resume repeats the evaluation of all sets
            self.boundary.due.insert(0, "evaluate")
            self.events.control.should_evaluate = True
            if isinstance(error, RewardError):
                raise
            self._leave()
        self._decide()

    def _end_epoch_if_due(self) -> None:
        """At the end of an epoch, notify the callbacks; if one of them ended it early, skip the rest."""
        if self.sampler.step and not self.decision.end_epoch and not self._stops():
            return
        self.events("on_epoch_end")
        self._decide()
        if self.decision.end_epoch and self.sampler.step and not self._stops():
            self.sampler.epoch, self.sampler.step = self.sampler.epoch + 1, 0
        self.boundary.due[:0] = AFTER_EPOCH

    def _save_if_due(self) -> None:
        if not self.decision.save:
            return
        self.events.control.should_save = False  # the saved state must not request another save
        self.boundary.due = ["announce save"]  # nothing else is due after it
        if not self._save():
            self.boundary.due = []

    def _announce_save(self) -> None:
        self.events("on_save")
        self._decide()

    def _goes_on(self) -> bool:
        """Whether there is a step left."""
        return self.state.global_step < self.total_steps and not self.boundary.ends

    def _stops(self) -> bool:
        """Whether the run ends here: because of a callback, or because this was its last step."""
        return self.decision.stop or self.state.global_step >= self.total_steps

    def _leave(self) -> NoReturn:
        """Save a checkpoint, unless the run saves none or has completed no step, and end the run; collective.

        Raises:
            RunStopped: on every rank.
        """
        reason = agreed_reason(REQUESTS.asked())
        assert reason is not None
        if self.args.save_strategy != "no" and self.state.global_step > 0:
            self._save()
        end_run(self.context, self.writer, self._finish_tables, reason)

    def _show_status(self) -> None:
        """Update the status file."""
        ACTIVITY.step = self.state.global_step
        if ACTIVITY.status is not None:
            ACTIVITY.status.update(
                state="running",
                run=self.writer.manifest.run,
                step=self.state.global_step,
                total_steps=self.total_steps,
            )

    # Start and end --------------------------------------------------------------------------------------------------

    def _seconds(self) -> float:
        """Return the duration of the run, without the time between a stop and a restart."""
        return self._before + time.monotonic() - self._started

    def _open_log(self) -> None:
        """Set the position and the length of the run, and write the first line of the log."""
        state = self.state
        self._started, self._before = time.monotonic(), self.totals.seconds
        self._show_status()
        if self.resumed is None:
            self.sampler.epoch, self.sampler.step, state.epoch = 0, 0, 0.0
        self._set_lengths()
        if self.resumed is not None:
            self.context.log_file.write({"event": "resume", "step": state.global_step, **self.resumed})
            return
        run, window = self.writer.manifest.run, self.sampler.window
        event = start_event(self.context, self.engines, self.data, run=run, window=window, steps=self.total_steps)
        self.context.log_file.write(event)

    def _before_first_step(self, evaluation: Iterable[tuple[WindowPlan, Sequence[AnyBatch], PreparedData]]) -> None:
        """Do what comes before the first step of this process."""
        self.events("on_train_begin")
        self.rehearse(self.total_steps - self.state.global_step)
        if self.resumed is not None:
            self._continue()
            return
        self.engines.window_pass.begin(evaluation)
        if self.args.eval_on_start:
            self.evaluate()  # no checkpoint, so it does not count for the best one

    def _continue(self) -> None:
        """Continue after a checkpoint: restore the random streams, and do what was due when it was written."""
        self.random.restore(self.state.global_step, rank())
        if self.args.save_strategy != "no":
            self.writer.prune(self.best.folder)  # a run killed during its last save does not save again
        if self.boundary.ends:
            if self.args.resume_anyway:
                tell("resume_anyway: continuing although a callback had ended this run here")
                self.boundary.ends = False
            else:
                tell(
                    f"a callback ended this run at step {self.state.global_step} of {self.total_steps}, so there is "
                    "nothing left to train; set resume_anyway: true to continue anyway"
                )
        # transformers resets this when training starts, and without a remaining step no callback would set it again.
        self.events.control.should_training_stop = self.boundary.ends or self.state.global_step >= self.total_steps
        self._decide()
        self._complete()

    def _set_lengths(self) -> None:
        """Set the length of the run and the intervals of logging, evaluation and saving for callbacks."""
        state = self.state
        state.max_steps = self.total_steps
        state.num_train_epochs = math.ceil(self.total_steps / self.sampler.steps_per_epoch)
        state.train_batch_size = self.args.per_device_train_batch_size
        state.compute_steps(self.args, self.total_steps)  # fractions of the run are rounded as in transformers

    @property
    def _failures(self) -> dict[str, float]:
        """Counts of failures so far, for the log; empty in most runs."""
        counts = {"bad_steps": float(self.bad_steps.count), "overflows": float(self.overflows.count)}
        return {name: count for name, count in counts.items() if count} | self.context.retries.metrics

    def _log(self, *, asked: bool) -> None:
        record = {
            **self.history.pop(self.context.method.logs_sums, asked=asked),
            **self.totals.last,
            "num_tokens": self.totals.tokens,
        }
        if self.args.include_num_input_tokens_seen:
            record["num_input_tokens_seen"] = self.totals.tokens
        if self.args.include_tokens_per_second:
            record["tokens_per_second"] = self.totals.tokens / self._seconds() / world_size()
        self.context.log(record)
        if not self.progress.draws:
            say(self.progress.line(record, self.state.epoch or 0.0))
        self.engines.window_pass.logged(self.state.global_step)

    def _evaluate(self) -> None:
        metrics = self.evaluate()
        if self.best.improved(metrics) and self.best.saves:
            self.events.control.should_save = True  # so that there is a checkpoint to return to

    def _save(self) -> bool:
        """Write a checkpoint; return whether it succeeded."""
        folder = checkpoint_folder(self.context.output_dir, self.state.global_step)
        self.best.saved(folder)
        if self.writer.newest == self.state.global_step:
            return True  # no progress since the checkpoint: this attempt counts as stalled
        self.totals.seconds = self._seconds()
        began = time.monotonic()
        with self.context.phases("save"):
            written = self.writer.write(keep=self.best.folder)
        if not written:
            self.best.lost()
            return False
        if ACTIVITY.status is not None:
            ACTIVITY.status.update(checkpoint=folder.name, stalled=0)
        if not self._saves and self.context.is_first:
            say(f"checkpoints: {tqdm.format_sizeof(self.writer.size, 'B')} each")
            tell(notice_too_short(time.monotonic() - began, self._step_seconds))
        self._saves += 1
        return True

    def _rescue(self) -> str:
        """Save the weights after the last good step, on every rank, unless the run saves nothing; return a message."""
        # To the callbacks of a resume: those of this run are not called again.
        self.boundary.due.insert(0, "announce save")
        if self.args.save_strategy == "no" or self.state.global_step == 0 or not self._save():
            return ""
        name = checkpoint_folder(self.context.output_dir, self.state.global_step).name
        return f". The weights of step {self.state.global_step} are saved in {name}"

    def _finish_tables(self) -> None:
        """Write table rows that are waiting for disk space, on the first rank."""
        self.engines.window_pass.finish()
        if self.context.answers is not None:
            self.context.answers.finish()

    def _finish(self) -> TrainOutput:
        REQUESTS.done = True  # only the result remains to be written, so stopping now saves no time
        ended: dict[str, Any] = {"ended_early": self.events.why_stopped()} if self.boundary.ends else {}
        if ended:
            say(f"finished early after step {self.state.global_step} of {self.total_steps}: {ended['ended_early']}")
        if self.args.load_best_model_at_end:
            ended["weights_step"] = self.best.load(self._load_best, say)
        seconds, steps = self._seconds(), self.state.global_step
        metrics = {
            "train_runtime": seconds,
            "train_samples_per_second": self.totals.rows / seconds,
            "train_steps_per_second": steps / seconds,
            "train_loss": self.totals.loss_sum / self.totals.losses if self.totals.losses else math.nan,
        }
        if self.args.include_tokens_per_second:
            metrics["train_tokens_per_second"] = self.totals.tokens / seconds / world_size()
        metrics |= self._failures
        late: list[str] = []
        if self.totals.reduced_windows:
            metrics[self.context.method.reduced_windows] = self.totals.reduced_windows
            late = self.context.method.advice_at_end(self.totals.reduced_windows, steps, self.state.log_history)
            self.context.data.advice.extend(late)
            for sentence in late:
                tell(f"advice: {sentence}")
        self.context.log({**metrics, **self._unlogged()})
        ended |= {"advice": late} if late else {}
        if (plan := self.context.memory_plan) is not None:
            ended |= {"predicted_bytes": {phase: plan.peak(phase) for phase in plan.plan.gpu}}
        self.context.log_file.write({"event": "end", "phases": self.context.phases.summary(), **ended})
        self.writer.finish(self.context.log_file.finish)
        self.writer.finish(self._finish_tables)
        self.events("on_train_end")
        self.writer.finish(lambda: self.writer.write_state(self.context.output_dir))
        return TrainOutput(steps, metrics["train_loss"], {**metrics, "epoch": self.state.epoch or 0.0})

    def _load_best(self, folder: Path) -> None:
        with self.context.phases("load best"):
            self.engines.restore(folder)

    def _unlogged(self) -> dict[str, float]:
        """Return the metrics of the steps since the last log for TRL's summary of a run, without the loss."""
        rest = self.history.rest(self.context.method.logs_sums)
        rest.pop("loss", None)  # it is in train_loss; log entries with a loss belong to steps
        return {**rest, "num_tokens": self.totals.tokens} if rest else {}
