"""The training loop, in the open: window, forward and backward, step, log, evaluate, save.

When to log, evaluate, save and stop is what transformers' callbacks say: its DefaultFlowCallback reads the options.
"""

from __future__ import annotations

import math
import pickle
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader
from transformers.trainer_utils import TrainOutput

from alignment.config.errors import RewardError, TrainingError
from alignment.data.batching import AnyBatch, EpochWindows
from alignment.data.windows import WindowPlan, WindowSampler
from alignment.engines.collectives import barrier, from_first_rank
from alignment.engines.launch_env import rank, world_size
from alignment.engines.saving import load_weights, write_model
from alignment.engines.scoring import PolicyEngine
from alignment.reporting.metrics import MetricHistory, means
from alignment.reporting.progress import Progress
from alignment.trainers.best import BestModel
from alignment.trainers.evaluation import evaluation_windows
from alignment.trainers.output import CHECKPOINT_PREFIX, prune_checkpoints
from alignment.trainers.sampling import total_steps
from alignment.trainers.summary import write_report
from alignment.trainers.window import NonFiniteLoss

if TYPE_CHECKING:
    from alignment.trainers.base import AlignmentTrainer
    from alignment.trainers.data_setup import PreparedData


class TrainingLoop:
    """Runs a trainer over its windows.

    Args:
        trainer: whose models, options and log are used.
        data: the training data.
        sampler: its windows.
    """

    def __init__(self, trainer: AlignmentTrainer, data: PreparedData, sampler: WindowSampler) -> None:
        self.trainer, self.data, self.sampler, self.args = trainer, data, sampler, trainer.args
        self.total_steps = total_steps(trainer.args, sampler)
        self.state, self.events = trainer.state, trainer.events
        self.best = BestModel(trainer.args, trainer.state)
        self.history = MetricHistory()
        self.tokens = self.rows = self.reduced_windows = 0
        self.loss_sum = self.losses = 0.0

    def run(self) -> TrainOutput:
        """Train to the last step; return transformers' ``TrainOutput``."""
        self._start()
        args, state = self.args, self.state
        shown = self.trainer.is_world_process_zero() and not args.disable_tqdm
        self.progress = Progress(self.total_steps, args.method, shown, self.trainer.window_pass.device)
        try:
            self.events("on_train_begin")
            self.trainer.window_pass.begin(evaluation_windows(self.trainer))
            if args.eval_on_start:
                self.trainer.evaluate()  # not of a checkpoint, so not among those that the best is chosen from
            for plan, batches in self._windows():
                if plan.step == 0:
                    self.events("on_epoch_begin")
                self.events("on_step_begin")
                self._step(plan, batches)
                self.events("on_step_end")
                self._act()
                if self.sampler.step == 0 or self._stops(epoch=True):
                    self.events("on_epoch_end")
                    self._act()
                if self._stops():
                    break
        except (NonFiniteLoss, RewardError) as error:  # both on every rank, with good weights
            kind = TrainingError if isinstance(error, NonFiniteLoss) else RewardError
            raise kind(f"step {state.global_step + 1}: {error}{self._rescue()}") from error
        finally:
            self.progress.close()
        return self._finish()

    def _stops(self, *, epoch: bool = False) -> bool:
        """Whether the run, or with ``epoch`` at least this epoch, ends here."""
        control = self.events.control
        last = control.should_training_stop or self.state.global_step >= self.total_steps
        return bool(last or (epoch and control.should_epoch_stop))

    def _act(self) -> None:
        """Do what the callbacks of all ranks ask for, which each of these may change for the next."""
        events = self.events
        events.agree()
        if events.control.should_log or (self._stops() and self.history):
            self._log()
            events.agree()
        if events.control.should_evaluate:
            self._evaluate()
            events.agree()
        if events.control.should_save:
            self._save()
            events("on_save")
            events.agree()

    def _start(self) -> None:
        args, state, window = self.args, self.state, self.sampler.window
        self.started = time.monotonic()
        self.sampler.epoch = self.sampler.step = 0
        state.global_step, state.epoch, state.max_steps = 0, 0.0, self.total_steps
        state.num_train_epochs = math.ceil(self.total_steps / self.sampler.steps_per_epoch)
        state.train_batch_size, state.logging_steps = args.per_device_train_batch_size, args.logging_steps
        state.eval_steps, state.save_steps = args.eval_steps, args.save_steps
        report = self.data.report
        self.trainer.log_file.write(
            {
                "event": "start",
                "run_name": args.run_name or self.trainer.output_dir.name,
                "method": args.method,
                "world_size": world_size(),
                "window": window,
                "steps": self.total_steps,
                "rows": report.rows_out,
                "dropped": report.dropped,
            }
        )

    def _windows(self) -> Iterator[tuple[WindowPlan, Sequence[AnyBatch]]]:
        """Windows from where the sampler stands to the last; it is moved on before each is handed out."""
        args, sampler = self.args, self.sampler
        while self.state.global_step < self.total_steps:
            left = min(sampler.steps_per_epoch, sampler.step + self.total_steps - self.state.global_step)
            loader = DataLoader(
                EpochWindows(self.trainer.method.collate, self.data.dataset, sampler, sampler.epoch, rank()),
                batch_size=None,
                sampler=range(sampler.step, left),
                num_workers=args.dataloader_num_workers,
                # Workers hand over bytes: as shared tensors, a large window would take more files than may be open.
                collate_fn=pickle.dumps if args.dataloader_num_workers else None,
            )
            for window in loader:
                plan, batches = pickle.loads(window) if isinstance(window, bytes) else window
                sampler.advance()
                yield plan, batches
                if self.events.control.should_epoch_stop and sampler.step:
                    sampler.epoch, sampler.step = sampler.epoch + 1, 0
                    break

    def _step(self, plan: WindowPlan, batches: Sequence[AnyBatch]) -> None:
        """One optimizer step."""
        items, counts = self.trainer.window_pass(
            plan, batches, self.data, train=True, between=lambda: self.events("on_substep_end")
        )
        learning_rate = self.policy.learning_rate
        grad_norm = self._update() if counts.rows else self._pass_over()
        state = self.state
        state.global_step += 1
        state.epoch = plan.epoch + (plan.step + 1) / self.sampler.steps_per_epoch
        self.tokens += counts.sequence_tokens
        self.rows += counts.rows
        self.loss_sum += items["loss"][0]
        self.losses += items["loss"][1]  # none where a window left nothing to learn from
        if self.args.include_num_input_tokens_seen:
            state.num_input_tokens_seen = self.tokens
        self.history.add(items)
        self.last = {"grad_norm": grad_norm, "learning_rate": learning_rate}
        reduced = self.trainer.method.check_window(counts)
        if reduced is not None:
            self.reduced_windows += 1
            say = self.trainer.tell if self.args.disable_tqdm else self.progress.note
            say(f"step {state.global_step}: {reduced}")
        self.progress.advance(means(items), counts.sequence_tokens)

    def _update(self) -> float:
        """Apply the gradient; return its norm."""
        policy = self.policy
        self.events("on_pre_optimizer_step")
        with self.trainer.phases("step"):
            grad_norm = policy.step()
        self.events("on_optimizer_step")
        if not math.isfinite(grad_norm) and not policy.skips_overflow:
            raise TrainingError(
                f"step {self.state.global_step + 1}: the gradient norm is {grad_norm} although the loss was finite; "
                "the weights may be lost. Start again from the last saved folder with a lower learning_rate"
            )
        return grad_norm

    def _pass_over(self) -> float:
        """A window that left nothing to learn from: the schedule moves on and no weight does."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)  # that is meant
            self.policy.scheduler.step()
        return 0.0

    @property
    def policy(self) -> PolicyEngine:
        """The training engine."""
        policy = self.trainer.window_pass.models.policy
        assert isinstance(policy, PolicyEngine)
        return policy

    def _log(self) -> None:
        record = {**self.history.pop(self.trainer.method.logs_sums), **self.last, "num_tokens": self.tokens}
        if self.args.include_num_input_tokens_seen:
            record["num_input_tokens_seen"] = self.tokens
        if self.args.include_tokens_per_second:
            record["tokens_per_second"] = self.tokens / (time.monotonic() - self.started) / world_size()
        self.trainer.log(record)
        self.trainer.window_pass.logged(self.state.global_step)

    def _evaluate(self) -> None:
        metrics = self.trainer.evaluate()
        if self.best.improved(metrics) and self.args.load_best_model_at_end:
            self.events.control.should_save = True  # or there would be nothing to come back to
        shown = {name: round(value, 4) for name, value in metrics.items() if name.endswith(("loss", "margins"))}
        self.progress.note(f"step {self.state.global_step}: {shown}")

    def _save(self) -> None:
        trainer = self.trainer
        folder = trainer.output_dir / f"{CHECKPOINT_PREFIX}{self.state.global_step}"
        first = trainer.is_world_process_zero()
        with trainer.phases("save"):
            write_model(self.policy.scorer.model, trainer.processing_class, folder, first_rank=first)
            self.best.saved(folder)
            trainer.write_state(folder)
            if first:
                prune_checkpoints(trainer.output_dir, self.args.save_total_limit, keep=self.best.folder)
            barrier()

    def _return_to_best(self) -> None:
        """Put the weights of the best evaluation back into the policy."""
        folder = from_first_rank(self.best.folder)
        if folder is None:
            self.trainer.tell("load_best_model_at_end: no evaluation was finite, so these are the last step's weights")
        if folder is None or self.state.best_global_step == self.state.global_step:
            return
        with self.trainer.phases("load best"):
            load_weights(self.policy.scorer.model, folder, first_rank=self.trainer.is_world_process_zero())
        self.progress.note(f"weights of {folder.name}: {self.args.metric_for_best_model} {self.state.best_metric:.6g}")

    def _rescue(self) -> str:
        """Save the weights that the last good step left, on every rank, unless the run saves nothing; say where."""
        if self.args.save_strategy == "no" or self.state.global_step == 0:
            return ""
        self._save()
        return f". The weights of step {self.state.global_step} are in {CHECKPOINT_PREFIX}{self.state.global_step}"

    def _finish(self) -> TrainOutput:
        if self.args.load_best_model_at_end:
            self._return_to_best()
        seconds, steps = time.monotonic() - self.started, self.state.global_step
        metrics = {
            "train_runtime": seconds,
            "train_samples_per_second": self.rows / seconds,
            "train_steps_per_second": steps / seconds,
            "train_loss": self.loss_sum / self.losses if self.losses else math.nan,
        }
        if self.args.include_tokens_per_second:
            metrics["train_tokens_per_second"] = self.tokens / seconds / world_size()
        if self.reduced_windows:
            metrics[self.trainer.method.reduced_windows] = self.reduced_windows
        self.trainer.log(metrics)
        self.trainer.log_file.write({"event": "end", "phases": self.trainer.phases.summary()})
        self.events("on_train_end")
        self.trainer.save_state()
        write_report(self.trainer, show=True)
        return TrainOutput(steps, metrics["train_loss"], {**metrics, "epoch": self.state.epoch or 0.0})
