"""The training loop: window, forward and backward, step, log, evaluate, save.

A checkpoint is the last act of a step: everything that callbacks requested at this step and at the end of the epoch
has been done by then, so that a resumed run has nothing to catch up on.

transformers' callbacks decide when to log, evaluate, save and stop: its DefaultFlowCallback reads the options.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from transformers.trainer_utils import TrainOutput

from alignment.checkpoint.folder import checkpoint_folder
from alignment.config.errors import RewardError, TrainingError
from alignment.config.fields import Strategy
from alignment.data.batching import AnyBatch
from alignment.data.windows import WindowCounts, WindowPlan, WindowSampler
from alignment.engines.launch_env import rank, world_size
from alignment.reporting.metrics import MetricHistory, means
from alignment.reporting.progress import Progress
from alignment.run.activity import ACTIVITY
from alignment.run.requests import REQUESTS, STOP_FILE
from alignment.run.safe_points import agreed_reason
from alignment.run.stop import Cut
from alignment.training.callbacks import Decision
from alignment.training.checkpointing.best import BestModel, load_best
from alignment.training.checkpointing.rewind import Rewinder
from alignment.training.checkpointing.writer import CheckpointWriter
from alignment.training.context import RunContext
from alignment.training.data import PreparedData, total_steps
from alignment.training.interruptions.faults import BadSteps
from alignment.training.interruptions.overflows import Overflows
from alignment.training.interruptions.stopping import end_run, notice_too_short
from alignment.training.method import Items
from alignment.training.run_engines import RunEngines
from alignment.training.run_state import Boundary, RandomAtStart, Totals
from alignment.training.start_event import start_event
from alignment.training.step import OptimizerStep
from alignment.training.window import BadStep
from alignment.training.window_loader import windows_of_epoch

# Where a run that is asked to stop may be interrupted, see Boundary.left.
_DONE, _STEP, _EPOCH = "done", "step", "epoch"


class TrainingLoop:
    """Trains on the windows of a run, starting at the current state.

    Args:
        context: the run.
        engines: its engines.
        data: the training data.
        sampler: the windows of the training data.
        evaluate: evaluates, logs and notifies the callbacks; returns all metrics by name.

    Attributes:
        resumed: the record of the log about the checkpoint that the run resumes from; None for a new run.
        ignores_end: continue even if a callback had ended the run.
        rewinder: returns to the last checkpoint.
    """

    def __init__(
        self,
        context: RunContext,
        engines: RunEngines,
        data: PreparedData,
        sampler: WindowSampler,
        evaluate: Callable[[], dict[str, float]],
    ) -> None:
        self.context, self.engines, self.data, self.sampler = context, engines, data, sampler
        self.evaluate = evaluate
        self.args, self.state, self.events = context.args, context.state, context.events
        self.total_steps = total_steps(context.args, sampler)
        self.best = BestModel(context.args, context.state)
        register = context.run_state.register
        self.history, self.totals = register("history", MetricHistory()), register("totals", Totals())
        self.boundary = register("boundary", Boundary())
        self.random = context.run_state.register_on_each_rank("random", RandomAtStart(context.args.seed))
        register("data", sampler)
        self.faults = register(
            "bad_steps",
            BadSteps(self.args, sampler.steps_per_epoch, data.source_rows, self._say, context.log_file.write),
        )
        self.overflows = register("overflows", Overflows(self._say, context.log_file.write))
        self.decision = Decision()
        self._step_seconds = 0.0  # duration of the newest step
        self._saves = 0  # number of saves in this process
        self._ends_with: str | None = None  # the error that ends the run after this step
        self.resumed: dict[str, Any] | None = None
        self.ignores_end = False
        self.rewinder: Rewinder | None = None

    def run(
        self,
        evaluation: Iterable[tuple[WindowPlan, Sequence[AnyBatch], PreparedData]],
        writer: CheckpointWriter,
    ) -> TrainOutput:
        """Train to the last step; return transformers' ``TrainOutput``.

        Args:
            evaluation: the windows of the evaluation sets.
            writer: writes checkpoints.
        """
        self.writer = writer
        fresh = self.resumed is None
        self._start(fresh)
        args, state = self.args, self.state
        stop_file = self.context.output_dir / STOP_FILE if self.context.is_first else None
        shown = self.context.is_first and not args.disable_tqdm
        self.progress = Progress(
            self.total_steps, args.method, shown, self.engines.window_pass.device, done=state.global_step
        )
        try:
            # Includes the final save, which a launcher's second signal must not interrupt.
            with REQUESTS.deferred(stop_file), ACTIVITY("training"):
                self._take_steps(fresh, evaluation)
                return self._finish()
        finally:
            self.progress.close()

    def _take_steps(
        self, fresh: bool, evaluation: Iterable[tuple[WindowPlan, Sequence[AnyBatch], PreparedData]]
    ) -> None:
        """Train to the last step; if the run ends early, save its state."""
        try:
            self.events("on_train_begin")
            if fresh:
                self.engines.window_pass.begin(evaluation)
                if self.args.eval_on_start:
                    self.evaluate()  # no checkpoint, so it does not count for the best one
            else:
                self._go_on()
            for plan, batches in self._windows():
                if plan.step == 0:
                    self.events("on_epoch_begin")
                self.events("on_step_begin")
                began = time.monotonic()
                if self._step(plan, batches):
                    self._step_seconds = time.monotonic() - began
                    self.events("on_step_end")
                    self._boundary()
        except Cut:  # within a window, which is repeated after a resume, or before the first one
            self._leave()
        except (BadStep, RewardError) as error:  # raised on every rank, with valid weights
            kind = TrainingError if isinstance(error, BadStep) else RewardError
            raise kind(f"step {self.state.global_step + 1}: {error}{self._rescue()}") from error

    def _go_on(self) -> None:
        """Continue after a checkpoint: notify the callbacks and restore the random streams."""
        self.random.restore(self.state.global_step, rank())
        if self.args.save_strategy != "no":
            self.writer.prune(self.best.folder)  # a run killed during its last save does not save again
        if self.boundary.ends:
            if self.ignores_end:
                self.context.tell("resume_anyway: continuing although a callback had ended this run here")
                self.boundary.ends = False
            else:
                self.context.tell(
                    f"a callback ended this run at step {self.state.global_step} of {self.total_steps}, so there is "
                    "nothing left to train; set resume_anyway: true to continue anyway"
                )
        # transformers resets this when training starts, and without a remaining step no callback would set it again.
        self.events.control.should_training_stop = self.boundary.ends or self.state.global_step >= self.total_steps
        left, self.boundary.left = self.boundary.left, ""
        if not left:
            self.events("on_save")
        self.decision = self.events.decide()
        if left in (_STEP, _EPOCH):
            self._complete(left)
        self.boundary.ends = self.boundary.ends or self._ended_early()

    def _boundary(self) -> None:
        """Do everything that happens between two steps; the state of the run is complete afterwards."""
        self.context.run_state.unmark()
        self._show_status()
        self.decision = self.events.decide()
        self._complete(_STEP)
        if self._ends_with is not None:  # on every rank, which have the same metrics
            raise TrainingError(f"step {self.state.global_step}: {self._ends_with}{self._rescue()}")
        if self.decision.leave is not None and self._goes_on():
            self._leave()

    def _complete(self, place: str) -> None:
        """Do what happens between two steps, starting at ``place``: after the step, or at the end of the epoch."""
        if place == _STEP:
            epoch_ends = self.sampler.step == 0 or self._stops(epoch=True)
            self._act(_STEP)
            # Callbacks notified meanwhile may also end the epoch.
            if epoch_ends or self._stops(epoch=True):
                self._end_epoch()
        else:
            self._act(_EPOCH)
        self.totals.seconds = self._seconds()
        if self.decision.save:
            self.events.control.should_save = False  # the saved state must not request another save
            self.boundary.ends = self._ended_early()
            if self._save():
                self.events("on_save")
                self.decision = self.events.decide()
        self.boundary.ends = self._ended_early()

    def _goes_on(self) -> bool:
        """Whether there is a step left."""
        return self.state.global_step < self.total_steps and not self.boundary.ends

    def _leave(self, left: str = _DONE) -> NoReturn:
        """Save a checkpoint and end the run before its last step, as requested; collective.

        Args:
            left: where the run is interrupted; a resume completes what remains to be done there.

        Raises:
            RunStopped: on every rank.
        """
        reason = agreed_reason(REQUESTS.asked())
        assert reason is not None
        self.boundary.left, self.boundary.ends = left, self._ended_early()
        if self.args.save_strategy != "no" and self.state.global_step > 0:
            self._save()
        end_run(self.context, self.writer, self._finish_tables, reason)

    def _show_status(self) -> None:
        """Update the status file."""
        ACTIVITY.step = self.state.global_step
        if ACTIVITY.status is not None:
            ACTIVITY.status.update(
                state="running",
                run=self.writer.identity.name,
                step=self.state.global_step,
                total_steps=self.total_steps,
            )

    def _ended_early(self) -> bool:
        """Whether a callback ends the run before its last step; transformers' own also stops at the last step."""
        return self.decision.stop and self.state.global_step < self.total_steps

    def _end_epoch(self) -> None:
        """End the epoch; if a callback ended it early, skip the rest."""
        self.events("on_epoch_end")
        self.decision = self.events.decide()
        if self.decision.end_epoch and self.sampler.step and not self._stops():
            self.sampler.epoch, self.sampler.step = self.sampler.epoch + 1, 0
        self._act(_EPOCH)

    def _stops(self, *, epoch: bool = False) -> bool:
        """Whether the run ends here; with ``epoch``, whether at least the epoch does."""
        last = self.decision.stop or self.state.global_step >= self.total_steps
        return last or (epoch and self.decision.end_epoch)

    def _act(self, place: str) -> None:
        """Log and evaluate as decided, deciding again after each, since callbacks are notified.

        Args:
            place: as in :meth:`_complete`; a run interrupted before or during an evaluation resumes there.
        """
        ends = self._stops() and self.args.logging_strategy == Strategy.STEPS
        if self.decision.log or (ends and self.history):
            self._log(asked=self.decision.log)
            self.decision = self.events.decide()
        if self.decision.evaluate:
            if self.decision.leave is not None:
                self._leave(place)
            try:
                self._evaluate()
            except Cut:
                self._leave(place)
            self.decision = self.events.decide()

    def _seconds(self) -> float:
        """Return the duration of the run, without the time between a stop and a restart."""
        return self._before + time.monotonic() - self._started

    def _start(self, fresh: bool) -> None:
        state = self.state
        self._started, self._before = time.monotonic(), self.totals.seconds
        self._show_status()
        if fresh:
            self.sampler.epoch, self.sampler.step, state.epoch = 0, 0, 0.0
        self._set_lengths()
        if self.resumed is not None:
            self.context.log_file.write({"event": "resume", "step": state.global_step, **self.resumed})
            return
        run, window = self.writer.identity.name, self.sampler.window
        event = start_event(self.context, self.engines, self.data, run=run, window=window, steps=self.total_steps)
        self.context.log_file.write(event)

    def _set_lengths(self) -> None:
        """Set the length of the run and the intervals of logging, evaluation and saving for callbacks."""
        state = self.state
        state.max_steps = self.total_steps
        state.num_train_epochs = math.ceil(self.total_steps / self.sampler.steps_per_epoch)
        state.train_batch_size = self.args.per_device_train_batch_size
        state.compute_steps(self.args, self.total_steps)  # fractions of the run are rounded as in transformers

    def _windows(self) -> Iterator[tuple[WindowPlan, Sequence[AnyBatch]]]:
        """Yield the remaining windows; the sampler is advanced before each one."""
        sampler = self.sampler
        while self._goes_on():
            last = min(sampler.steps_per_epoch, sampler.step + self.total_steps - self.state.global_step)
            for plan, batches in windows_of_epoch(self.context, self.data, sampler, last):
                self.context.run_state.mark("data", "random")
                sampler.advance()
                place = sampler.epoch, sampler.step
                yield plan, batches
                # The position has changed: the rest of an epoch is skipped, or the run was rewound.
                if sampler.step == 0 or self.boundary.ends or (sampler.epoch, sampler.step) != place:
                    break

    def _step(self, plan: WindowPlan, batches: Sequence[AnyBatch]) -> bool:
        """Take one optimizer step; return False if the run was rewound instead."""
        learning_rate = self.engines.policy.learning_rate
        step = OptimizerStep(self.context, self.engines, self.data, self.faults, self.overflows)
        try:
            items, counts, grad_norm = step(plan, batches)
        except BadStep as fault:
            rewind = functools.partial(self._rewound, step, fault)
            if self.faults.rewinds(fault, plan, self.state.global_step + 1, rewind):
                assert self.rewinder is not None
                self.rewinder.amend()
                self._set_lengths()  # the checkpoint may be from an attempt with different options
                self.progress.back_to(self.state.global_step)
                self._go_on()
                return False
            step.discard(fault)
            items, counts, grad_norm = step.left_out()
        state = self.state
        state.global_step += 1
        state.epoch = plan.epoch + (plan.step + 1) / self.sampler.steps_per_epoch
        loss, losses = items.get("loss", (0.0, 0.0))  # missing if the window has nothing to train on
        self.totals.tokens += counts.sequence_tokens
        self.totals.rows += counts.rows
        self.totals.loss_sum += loss
        self.totals.losses += losses
        if self.args.include_num_input_tokens_seen:
            state.num_input_tokens_seen = self.totals.tokens
        self.history.add(items)
        self.totals.last = {"grad_norm": grad_norm, "learning_rate": learning_rate, **self._faults()}
        self._check_reduced(counts, items)
        self.progress.advance(means(items), counts.sequence_tokens)
        return True

    def _check_reduced(self, counts: WindowCounts, items: Items) -> None:
        """Report and count a window that was computed in a reduced form."""
        method, totals, self._ends_with = self.context.method, self.totals, None
        reduced = method.check_window(counts, items) if items else None
        if reduced is not None:
            totals.reduced_windows, totals.reduced_in_a_row = totals.reduced_windows + 1, totals.reduced_in_a_row + 1
            self._say(f"step {self.state.global_step}: {reduced}")
            self._ends_with = method.check_reduced(totals.reduced_in_a_row, items)
        elif items:
            totals.reduced_in_a_row = 0

    def _rewound(self, step: OptimizerStep, fault: BadStep) -> tuple[str, int] | None:
        """Return to the last checkpoint, if any; return its name and the number of windows before it."""
        step.discard(fault)
        name = self.rewinder() if self.rewinder is not None else None
        return None if name is None else (name, self.sampler.epoch * self.sampler.steps_per_epoch + self.sampler.step)

    def _faults(self) -> dict[str, float]:
        """Return counts of failures so far, for the log; empty in most runs."""
        self.context.retries.write(self.context.log_file.write)
        return {**self.faults.metrics, **self.overflows.metrics, **self.context.retries.metrics}

    def _say(self, text: str) -> None:
        (self.context.tell if self.args.disable_tqdm else self.progress.note)(text)

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
        self.engines.window_pass.logged(self.state.global_step)

    def _evaluate(self) -> None:
        metrics = self.evaluate()
        if self.best.improved(metrics) and self.best.saves:
            self.events.control.should_save = True  # so that there is a checkpoint to return to
        shown = {name: round(value, 4) for name, value in metrics.items() if name.endswith(("loss", "margins"))}
        self.progress.note(f"step {self.state.global_step}: {shown}")

    def _save(self) -> bool:
        """Write a checkpoint; return whether it succeeded."""
        folder = checkpoint_folder(self.context.output_dir, self.state.global_step)
        self.best.saved(folder)
        if self.writer.newest == self.state.global_step:
            return True  # no progress since the checkpoint: this attempt counts as stalled
        start = time.monotonic()
        if not self.writer.write(keep=self.best.folder):
            self.best.lost()
            return False
        if ACTIVITY.status is not None:
            ACTIVITY.status.update(checkpoint=folder.name, stalled=0)
        if not self._saves and self.context.is_first:
            self.context.tell(notice_too_short(time.monotonic() - start, self._step_seconds))
        self._saves += 1
        return True

    def _rescue(self) -> str:
        """Save the weights after the last good step, on every rank, unless the run saves nothing; return a message."""
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
        if self.args.load_best_model_at_end:
            loaded = load_best(self.context, self.engines, self.best)
            if loaded is not None:
                self.progress.note(loaded)
        seconds, steps = self._seconds(), self.state.global_step
        metrics = {
            "train_runtime": seconds,
            "train_samples_per_second": self.totals.rows / seconds,
            "train_steps_per_second": steps / seconds,
            "train_loss": self.totals.loss_sum / self.totals.losses if self.totals.losses else math.nan,
        }
        if self.args.include_tokens_per_second:
            metrics["train_tokens_per_second"] = self.totals.tokens / seconds / world_size()
        metrics |= self._faults()
        late: list[str] = []
        if self.totals.reduced_windows:
            metrics[self.context.method.reduced_windows] = self.totals.reduced_windows
            late = self.context.method.advice_at_end(self.totals.reduced_windows, steps, self.state.log_history)
            self.context.advice.extend(late)
            for sentence in late:
                self.context.tell(f"advice: {sentence}")
        self.context.log({**metrics, **self._rest()})
        said = {"advice": late} if late else {}
        self.context.log_file.write({"event": "end", "phases": self.context.phases.summary(), **said})
        for finish in (self.context.log_file.finish, self._finish_tables):
            self.writer.finish(finish)
        self.events("on_train_end")
        self.writer.finish(lambda: self.writer.write_state(self.context.output_dir))
        return TrainOutput(steps, metrics["train_loss"], {**metrics, "epoch": self.state.epoch or 0.0})

    def _rest(self) -> dict[str, float]:
        """Return the metrics of the steps since the last log for TRL's summary of a run, without the loss."""
        rest = self.history.rest(self.context.method.logs_sums)
        rest.pop("loss", None)  # it is in train_loss; log entries with a loss belong to steps
        return {**rest, "num_tokens": self.totals.tokens} if rest else {}
