"""The training loop, in the open: window, forward and backward, step, log, evaluate, save.

A step ends with its checkpoint: by then everything that callbacks asked for at this step, and at the end of the epoch,
has been done, so that a run that goes on from it has nothing to make up for.

When to log, evaluate, save and stop is what transformers' callbacks say: its DefaultFlowCallback reads the options.
"""

from __future__ import annotations

import functools
import math
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader
from transformers.trainer_utils import TrainOutput

from alignment.config.errors import RewardError, TrainingError
from alignment.config.fields import Strategy
from alignment.data.batching import AnyBatch, EpochWindows
from alignment.data.windows import WindowPlan, WindowSampler
from alignment.engines.checkpoints.folder import checkpoint_folder
from alignment.engines.collectives import from_first_rank, on_first_rank
from alignment.engines.launch_env import rank, world_size
from alignment.engines.watch.requests import REQUESTS, STOP_FILE
from alignment.engines.watch.safe_points import agreed_reason
from alignment.engines.watch.signals import ignore_stop_signals
from alignment.engines.watch.stop import Cut
from alignment.reporting.activity import ACTIVITY
from alignment.reporting.metrics import MetricHistory, means
from alignment.reporting.progress import Progress
from alignment.training.callbacks import Decision
from alignment.training.checkpointing.best import BestModel, damage_of_model
from alignment.training.checkpointing.rewind import Rewinder
from alignment.training.checkpointing.writer import CheckpointWriter
from alignment.training.context import RunContext
from alignment.training.data import PreparedData, total_steps
from alignment.training.interruptions.faults import BadSteps
from alignment.training.interruptions.overflows import Overflows
from alignment.training.interruptions.stopping import end_run, notice_too_short
from alignment.training.run_engines import RunEngines
from alignment.training.run_state import Boundary, RandomAtStart, Totals
from alignment.training.start_event import start_event
from alignment.training.step import OptimizerStep
from alignment.training.window import BadStep

# Where a run that is asked to stop may be left, see Boundary.left.
_DONE, _STEP, _EPOCH = "done", "step", "epoch"
_STATUS_S = 2.0  # between two writes of an unchanged state


class TrainingLoop:
    """Runs over the windows of a run, from where its state stands.

    Args:
        context: the run.
        engines: its engines.
        data: the training data.
        sampler: its windows.
        evaluate: evaluates, logs and tells the callbacks; its result has every metric by name.

    Attributes:
        resumed: what the log says of the checkpoint that the run goes on from; None in a run that begins.
        ignores_end: go on also where a callback had ended the run.
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
        self._step_seconds = 0.0  # of the newest step
        self._saves = 0  # of this process
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
            evaluation: the windows of the sets to evaluate on.
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
            # Whatever ends the run is saved within it too: a launcher's second signal must not cut that save off.
            with REQUESTS.deferred(stop_file), ACTIVITY("training"):
                self._take_steps(fresh, evaluation)
                return self._finish()
        finally:
            self.progress.close()

    def _take_steps(
        self, fresh: bool, evaluation: Iterable[tuple[WindowPlan, Sequence[AnyBatch], PreparedData]]
    ) -> None:
        """To the last one; a run that ends before it saves what it has."""
        try:
            self.events("on_train_begin")
            if fresh:
                self.engines.window_pass.begin(evaluation)
                if self.args.eval_on_start:
                    self.evaluate()  # not of a checkpoint, so not among those that the best is chosen from
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
        except Cut:  # in the middle of a window, which is done again after a resume, or before the first one
            self._leave()
        except (BadStep, RewardError) as error:  # both on every rank, with good weights
            kind = TrainingError if isinstance(error, BadStep) else RewardError
            raise kind(f"step {self.state.global_step + 1}: {error}{self._rescue()}") from error

    def _go_on(self) -> None:
        """Do what follows a checkpoint: the callbacks hear of it, and the random streams are those that were saved."""
        self.random.restore(self.state.global_step, rank())
        if self.args.save_strategy != "no":
            self.writer.prune(self.best.folder)  # a run that was killed at its last save will come to no other
        if self.boundary.ends:
            if self.ignores_end:
                self.context.tell("resume_anyway: a callback had ended this run here; it goes on")
                self.boundary.ends = False
            else:
                self.context.tell(
                    f"a callback ended this run at step {self.state.global_step} of {self.total_steps}, so there is "
                    "nothing left to train; to go on all the same, set resume_anyway: true"
                )
        # transformers takes this back where training begins, and with no step left nobody would ask for it again.
        self.events.control.should_training_stop = self.boundary.ends or self.state.global_step >= self.total_steps
        left, self.boundary.left = self.boundary.left, ""
        if not left:
            self.events("on_save")
        self.decision = self.events.decide()
        if left in (_STEP, _EPOCH):
            self._complete(left)
        self.boundary.ends = self.boundary.ends or self._ended_early()

    def _boundary(self) -> None:
        """Everything between two steps; after it, the state of the run is whole."""
        self.context.run_state.unmark()
        self._show_status()
        self.decision = self.events.decide()
        self._complete(_STEP)
        if self.decision.leave is not None and self._goes_on():
            self._leave()

    def _complete(self, place: str) -> None:
        """Everything between two steps, from ``place`` on: the acts of the step, or those that end the epoch."""
        if place == _STEP:
            epoch_ends = self.sampler.step == 0 or self._stops(epoch=True)
            self._act(_STEP)
            # Callbacks that heard of what was done may end the epoch as well.
            if epoch_ends or self._stops(epoch=True):
                self._end_epoch()
        else:
            self._act(_EPOCH)
        self.totals.seconds = self._seconds()
        if self.decision.save:
            self.events.control.should_save = False  # in what is saved it has happened
            self.boundary.ends = self._ended_early()
            if self._save():
                self.events("on_save")
                self.decision = self.events.decide()
        self.boundary.ends = self._ended_early()

    def _goes_on(self) -> bool:
        """Whether there is a step left to take."""
        return self.state.global_step < self.total_steps and not self.boundary.ends

    def _leave(self, left: str = _DONE) -> NoReturn:
        """Save a checkpoint and end the run before its last step, as it was asked to; collective.

        Args:
            left: where; what remains to be done there is made up for after a resume.

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
        """Tell whoever watches the run where it stands."""
        ACTIVITY.step = self.state.global_step
        if ACTIVITY.status is not None:
            ACTIVITY.status.update(
                within=_STATUS_S,
                state="running",
                run=self.writer.identity.name,
                step=self.state.global_step,
                total_steps=self.total_steps,
            )

    def _ended_early(self) -> bool:
        """Whether a callback ends the run before its last step; transformers' own asks for a stop at that one too."""
        return self.decision.stop and self.state.global_step < self.total_steps

    def _end_epoch(self) -> None:
        """What an epoch ends with; the rest of one that a callback ended is left out."""
        self.events("on_epoch_end")
        self.decision = self.events.decide()
        if self.decision.end_epoch and self.sampler.step and not self._stops():
            self.sampler.epoch, self.sampler.step = self.sampler.epoch + 1, 0
        self._act(_EPOCH)

    def _stops(self, *, epoch: bool = False) -> bool:
        """Whether the run, or with ``epoch`` at least this epoch, ends here."""
        last = self.decision.stop or self.state.global_step >= self.total_steps
        return last or (epoch and self.decision.end_epoch)

    def _act(self, place: str) -> None:
        """Log and evaluate as all ranks have decided. They decide anew after each, for callbacks hear of it.

        Args:
            place: in :meth:`_complete`; a run that leaves before an evaluation, or in it, resumes there.
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
        """Since the run began, without the time between a stop and a restart."""
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
        """Tell the callbacks how long the run is, and after how many steps each thing happens that has a number."""
        state = self.state
        state.max_steps = self.total_steps
        state.num_train_epochs = math.ceil(self.total_steps / self.sampler.steps_per_epoch)
        state.train_batch_size = self.args.per_device_train_batch_size
        state.compute_steps(self.args, self.total_steps)  # of a share of the run, as transformers rounds it

    def _windows(self) -> Iterator[tuple[WindowPlan, Sequence[AnyBatch]]]:
        """Windows from where the sampler stands to the last; it is moved on before each is handed out."""
        args, sampler = self.args, self.sampler
        while self._goes_on():
            left = min(sampler.steps_per_epoch, sampler.step + self.total_steps - self.state.global_step)
            loader = DataLoader(
                EpochWindows(self.context.method.collate, self.data.batched, sampler, sampler.epoch, rank()),
                batch_size=None,
                sampler=range(sampler.step, left),
                num_workers=args.dataloader_num_workers,
                # Workers hand over bytes: as shared tensors, a large window would take more files than may be open.
                collate_fn=pickle.dumps if args.dataloader_num_workers else None,
                # Its iterator draws once; from the process's generator, what is drawn later would depend on restarts.
                generator=torch.Generator().manual_seed(args.seed),
                worker_init_fn=ignore_stop_signals,
            )
            for window in loader:
                plan, batches = pickle.loads(window) if isinstance(window, bytes) else window
                self.context.run_state.mark("data", "random")
                sampler.advance()
                place = sampler.epoch, sampler.step
                yield plan, batches
                # Somewhere else: the rest of an epoch is left out, or the run was rewound.
                if sampler.step == 0 or self.boundary.ends or (sampler.epoch, sampler.step) != place:
                    break

    def _step(self, plan: WindowPlan, batches: Sequence[AnyBatch]) -> bool:
        """One optimizer step; False where the run has returned to an earlier one instead."""
        learning_rate = self.engines.policy.learning_rate
        step = OptimizerStep(self.context, self.engines, self.data, self.faults, self.overflows)
        try:
            items, counts, grad_norm = step(plan, batches)
        except BadStep as fault:
            rewind = functools.partial(self._rewound, step, fault)
            if self.faults.rewinds(fault, plan, self.state.global_step + 1, rewind):
                assert self.rewinder is not None
                self.rewinder.amend()
                self._set_lengths()  # the checkpoint may be of an attempt with other options
                self.progress.back_to(self.state.global_step)
                self._go_on()
                return False
            step.discard(fault)
            items, counts, grad_norm = step.left_out()
        state = self.state
        state.global_step += 1
        state.epoch = plan.epoch + (plan.step + 1) / self.sampler.steps_per_epoch
        loss, losses = items.get("loss", (0.0, 0.0))  # none where a window left nothing to train on
        self.totals.tokens += counts.sequence_tokens
        self.totals.rows += counts.rows
        self.totals.loss_sum += loss
        self.totals.losses += losses
        if self.args.include_num_input_tokens_seen:
            state.num_input_tokens_seen = self.totals.tokens
        self.history.add(items)
        self.totals.last = {"grad_norm": grad_norm, "learning_rate": learning_rate, **self._faults()}
        reduced = self.context.method.check_window(counts) if items else None
        if reduced is not None:
            self.totals.reduced_windows += 1
            self._say(f"step {state.global_step}: {reduced}")
        self.progress.advance(means(items), counts.sequence_tokens)
        return True

    def _rewound(self, step: OptimizerStep, fault: BadStep) -> tuple[str, int] | None:
        """Return to the last checkpoint, if there is one; its name, and how many windows came before it."""
        step.discard(fault)
        name = self.rewinder() if self.rewinder is not None else None
        return None if name is None else (name, self.sampler.epoch * self.sampler.steps_per_epoch + self.sampler.step)

    def _faults(self) -> dict[str, float]:
        """How much went wrong so far, for the log; nothing in most runs."""
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
            self.events.control.should_save = True  # or there would be nothing to come back to
        shown = {name: round(value, 4) for name, value in metrics.items() if name.endswith(("loss", "margins"))}
        self.progress.note(f"step {self.state.global_step}: {shown}")

    def _save(self) -> bool:
        """Write a checkpoint, unless that fails; whether it is there."""
        folder = checkpoint_folder(self.context.output_dir, self.state.global_step)
        self.best.saved(folder)
        if self.writer.newest == self.state.global_step:
            return True  # and no progress since: an attempt that only leaves again is one that stalled
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

    def _return_to_best(self) -> None:
        """Put the weights of the best evaluation back into the policy."""
        folder = from_first_rank(self.best.folder)
        if folder is None:
            self.context.tell("load_best_model_at_end: no evaluation was finite, so these are the last step's weights")
        if folder is None or self.state.best_global_step == self.state.global_step:
            return
        damage = on_first_rank(lambda: damage_of_model(folder, read=True))
        if damage is not None:
            self.context.tell(f"load_best_model_at_end: {damage}; so these are the last step's weights")
            return
        with self.context.phases("load best"):
            self.engines.restore(folder)
        self.progress.note(f"weights of {folder.name}: {self.args.metric_for_best_model} {self.state.best_metric:.6g}")

    def _rescue(self) -> str:
        """Save the weights that the last good step left, on every rank, unless the run saves nothing; say where."""
        if self.args.save_strategy == "no" or self.state.global_step == 0 or not self._save():
            return ""
        name = checkpoint_folder(self.context.output_dir, self.state.global_step).name
        return f". The weights of step {self.state.global_step} are in {name}"

    def _finish_tables(self) -> None:
        """Write rows of tables that wait for space, on the first rank."""
        self.engines.window_pass.finish()
        if self.context.answers is not None:
            self.context.answers.finish()

    def _finish(self) -> TrainOutput:
        REQUESTS.done = True  # what is left is to write the result, and stopping now would save no time
        if self.args.load_best_model_at_end:
            self._return_to_best()
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
        if self.totals.reduced_windows:
            metrics[self.context.method.reduced_windows] = self.totals.reduced_windows
        self.context.log({**metrics, **self._rest()})
        self.context.log_file.write({"event": "end", "phases": self.context.phases.summary()})
        for finish in (self.context.log_file.finish, self._finish_tables):
            self.writer.finish(finish)
        self.events("on_train_end")
        self.writer.finish(lambda: self.writer.write_state(self.context.output_dir))
        return TrainOutput(steps, metrics["train_loss"], {**metrics, "epoch": self.state.epoch or 0.0})

    def _rest(self) -> dict[str, float]:
        """What TRL's summary of a run has of the steps after the last log: their metrics, but for the loss."""
        rest = self.history.rest(self.context.method.logs_sums)
        rest.pop("loss", None)  # it is in train_loss, and an entry with a loss is a step's
        return {**rest, "num_tokens": self.totals.tokens} if rest else {}
