"""Callbacks that sample completions, with TRL's names, using the same code as ``generate_during_eval``."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import IntervalStrategy

from alignment.checkpoint.run_folder import COMPLETIONS
from alignment.config.errors import OptionError, setting, show
from alignment.reporting.completions import CompletionTable
from alignment.training.sampling.sampler import (
    Speaker,
    completions,
    decoded,
    first_prompts,
    fitting,
    of_model,
    sampling_of,
)

_LONGEST = 256  # default for max_new_tokens


class LogCompletionsCallback(TrainerCallback):
    """Samples the policy's completions for evaluation prompts every ``freq`` steps.

    Tables of step, prompt and completion are written to ``completions.jsonl``, Weights & Biases and TensorBoard.
    Training is not affected: its results are those of a run without the callback.

    Args:
        trainer: a trainer of this package with evaluation data; the first of several sets is used.
        generation_config: how to sample, greedily unless ``do_sample`` is set; None uses the model's own. Without
            ``max_new_tokens``, completions have at most 256 tokens.
        num_prompts: number of distinct prompts, taken from the start; None uses all.
        freq: number of steps between tables; None uses ``eval_steps``.

    Raises:
        OptionError: if there is no evaluation data, the trainer is not of this package, or an argument is invalid.
    """

    def __init__(
        self,
        trainer: Any,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        freq: int | None = None,
    ) -> None:
        if not hasattr(trainer, "data") or not hasattr(trainer, "context"):
            raise OptionError(
                f"trainer: {show(type(trainer).__name__)} is not a trainer of this package; pass one that is"
            )
        if not trainer.data.eval:
            raise OptionError(
                "LogCompletionsCallback: the trainer has no evaluation data; pass eval_dataset to the trainer"
            )
        for name, value in (("num_prompts", num_prompts), ("freq", freq)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{setting(name, value)}: expected an integer of at least 1")
        self.trainer, self.generation_config, self.freq = trainer, generation_config, freq
        self.prompts = first_prompts(next(iter(trainer.data.eval.values())), num_prompts)
        if generation_config is not None:
            sampling_of(generation_config, trainer.processing_class, _LONGEST, draw=False)  # check it now
        path = trainer.output_dir / COMPLETIONS if trainer.is_world_process_zero() else None
        self._table = CompletionTable(path, trainer.events.handler.callbacks)
        number = sum(name.startswith("logged completions") for name in trainer.context.run_state.parts)
        trainer.context.run_state.register(f"logged completions {number}", self._table)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Sample, if a table is due; called on every rank."""
        if state.global_step % self._every(args, state):
            return
        trainer = self.trainer
        policy, tokenizer = Speaker(trainer.engines.window_pass.models.policy), trainer.processing_class
        if self.generation_config is None:
            sampling = sampling_of(of_model(policy.model.generation_config), tokenizer, _LONGEST)
        else:
            sampling = sampling_of(self.generation_config, tokenizer, _LONGEST, draw=False)
        prompts, sampling = fitting(policy.model, self.prompts, sampling)
        texts = completions(trainer.context, policy, prompts, sampling, "completions")
        if trainer.is_world_process_zero():
            rows = zip(decoded(trainer.context, prompts), texts, strict=True)
            self._table.write(state.global_step, [{"prompt": one, "completion": text} for one, text in rows])

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write rows that are waiting for disk space."""
        self._table.finish()

    def _every(self, args: Any, state: TrainerState) -> int:
        """Return the number of steps between tables; if evaluation is per epoch, so are tables."""
        if self.freq is not None:
            return self.freq
        if args.eval_strategy == IntervalStrategy.EPOCH:
            return max(1, round(state.max_steps / max(1, state.num_train_epochs)))
        return max(1, int(state.eval_steps or state.logging_steps or 1))


class WinRateCallback(TrainerCallback):
    """Not supported: it compares with completions sampled when the process started, which a resumed run lacks.

    Raises:
        OptionError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise OptionError(
            "WinRateCallback: not supported; method online_dpo with a judge logs eval_win_rate against the initial "
            "policy, and generate_during_eval writes completions that a judge can compare later"
        )
