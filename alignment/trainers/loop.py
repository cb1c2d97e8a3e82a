"""The training loop, in the open: window, forward and backward, step, log, evaluate, save."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader
from transformers.trainer_utils import TrainOutput

from alignment.config.errors import TrainingError
from alignment.config.options import AlignmentConfig
from alignment.data.batching import AnyBatch, EpochWindows
from alignment.data.windows import WindowPlan, WindowSampler
from alignment.engines.collectives import barrier
from alignment.engines.launch_env import rank, world_size
from alignment.engines.saving import write_model
from alignment.engines.scoring import PolicyEngine
from alignment.reporting.metrics import MetricHistory, means
from alignment.reporting.progress import Progress
from alignment.trainers.output import CHECKPOINT_PREFIX, prune_checkpoints
from alignment.trainers.window import NonFiniteLoss

if TYPE_CHECKING:
    from alignment.trainers.base import AlignmentTrainer
    from alignment.trainers.data_setup import PreparedData


def total_steps(args: AlignmentConfig, sampler: WindowSampler) -> int:
    """Optimizer steps of the whole run."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * sampler.steps_per_epoch)


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
        self.state = trainer.state
        self.history = MetricHistory()
        self.tokens = self.rows = self.reduced_windows = 0
        self.loss_sum = 0.0

    def run(self) -> TrainOutput:
        """Train to the last step; return transformers' ``TrainOutput``."""
        self._start()
        args, state = self.args, self.state
        shown = self.trainer.is_world_process_zero() and not args.disable_tqdm
        self.progress = Progress(self.total_steps, args.method, shown, self.trainer.window_pass.device)
        try:
            if args.eval_on_start:
                self._evaluate()
            for plan, batches in self._windows():
                self._step(plan, batches)
                epoch_ends = self.sampler.step == 0
                last = state.global_step == self.total_steps
                first = args.logging_first_step and state.global_step == 1
                if state.global_step % args.logging_steps == 0 or last or first:
                    self._log()
                if self._due(args.eval_strategy, args.eval_steps, epoch_ends or last):
                    self._evaluate()
                if self._due(args.save_strategy, args.save_steps, epoch_ends or last):
                    self._save()
        except NonFiniteLoss as error:
            raise TrainingError(f"step {state.global_step + 1}: {error}{self._rescue()}") from error
        finally:
            self.progress.close()
        return self._finish()

    def _start(self) -> None:
        args, state, window = self.args, self.state, self.sampler.window
        self.started = time.monotonic()
        self.sampler.epoch = self.sampler.step = 0
        state.global_step, state.epoch, state.max_steps = 0, 0.0, self.total_steps
        state.num_train_epochs = math.ceil(self.total_steps / self.sampler.steps_per_epoch)
        state.train_batch_size, state.logging_steps = args.per_device_train_batch_size, args.logging_steps
        state.eval_steps, state.save_steps = args.eval_steps, args.save_steps
        state.is_world_process_zero = self.trainer.is_world_process_zero()
        state.is_local_process_zero = args.local_process_index == 0
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

    def _step(self, plan: WindowPlan, batches: Sequence[AnyBatch]) -> None:
        """One optimizer step."""
        policy = self.policy
        items = self.trainer.window_pass(plan, batches, self.data.source_row, train=True)
        learning_rate = policy.learning_rate
        with self.trainer.phases("step"):
            grad_norm = policy.step()
        if not math.isfinite(grad_norm) and not policy.skips_overflow:
            raise TrainingError(
                f"step {self.state.global_step + 1}: the gradient norm is {grad_norm} although the loss was finite; "
                "the weights may be lost. Start again from the last saved folder with a lower learning_rate"
            )
        state, counts = self.state, plan.counts
        state.global_step += 1
        state.epoch = state.global_step / self.sampler.steps_per_epoch
        self.tokens += counts.sequence_tokens
        self.rows += counts.rows
        self.loss_sum += items["loss"][0]
        if self.args.include_num_input_tokens_seen:
            state.num_input_tokens_seen = self.tokens
        self.history.add(items)
        self.last = {"grad_norm": grad_norm, "learning_rate": learning_rate}
        reduced = self.trainer.method.check_window(counts)
        if reduced is not None:
            self.reduced_windows += 1
            self.progress.note(f"step {state.global_step}: {reduced}")
        self.progress.advance(means(items), counts.sequence_tokens)

    @property
    def policy(self) -> PolicyEngine:
        """The training engine."""
        policy = self.trainer.window_pass.models.policy
        assert isinstance(policy, PolicyEngine)
        return policy

    def _due(self, strategy: str, steps: int | None, epoch_ends: bool) -> bool:
        if strategy == "epoch":
            return epoch_ends
        return strategy == "steps" and bool(steps) and self.state.global_step % (steps or 1) == 0

    def _log(self) -> None:
        record = {**self.history.pop(), **self.last, "num_tokens": self.tokens}
        if self.args.include_num_input_tokens_seen:
            record["num_input_tokens_seen"] = self.tokens
        if self.args.include_tokens_per_second:
            record["tokens_per_second"] = self.tokens / (time.monotonic() - self.started) / world_size()
        self.trainer.log(record)

    def _evaluate(self) -> None:
        metrics = self.trainer.evaluate()
        shown = {name: round(value, 4) for name, value in metrics.items() if name.endswith(("loss", "margins"))}
        self.progress.note(f"step {self.state.global_step}: {shown}")

    def _save(self) -> None:
        trainer = self.trainer
        folder = trainer.output_dir / f"{CHECKPOINT_PREFIX}{self.state.global_step}"
        first = trainer.is_world_process_zero()
        with trainer.phases("save"):
            write_model(self.policy.scorer.model, trainer.processing_class, folder, first_rank=first)
            trainer.write_state(folder)
            if first:
                prune_checkpoints(trainer.output_dir, self.args.save_total_limit)
            barrier()

    def _rescue(self) -> str:
        """Save the weights that the last good step left, on every rank, unless the run saves nothing; say where."""
        if self.args.save_strategy == "no" or self.state.global_step == 0:
            return ""
        self._save()
        return f". The weights of step {self.state.global_step} are in {CHECKPOINT_PREFIX}{self.state.global_step}"

    def _finish(self) -> TrainOutput:
        seconds, steps = time.monotonic() - self.started, self.state.global_step
        metrics = {
            "train_runtime": seconds,
            "train_samples_per_second": self.rows / seconds,
            "train_steps_per_second": steps / seconds,
            "train_loss": self.loss_sum / max(steps, 1),
        }
        if self.args.include_tokens_per_second:
            metrics["train_tokens_per_second"] = self.tokens / seconds / world_size()
        if self.reduced_windows:
            metrics["windows_without_kl"] = self.reduced_windows
        self.trainer.log(metrics)
        self.trainer.log_file.write({"event": "end", "phases": self.trainer.phases.summary()})
        self.trainer.save_state()
        return TrainOutput(steps, metrics["train_loss"], {**metrics, "epoch": self.state.epoch or 0.0})
