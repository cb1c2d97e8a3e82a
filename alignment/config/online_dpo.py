"""The options of Online DPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alignment.config import checks
from alignment.config.errors import OptionError
from alignment.config.fields import option
from alignment.config.options import AlignmentConfig
from alignment.config.options_rollout import RewardOptions, RolloutOptions
from alignment.config.refusals import shown

ONLINE_DPO_LOSS_TYPES = ("sigmoid", "ipo")
_REWARD_OPTIONS = ("reward_model_path", "reward_funcs", "reward_weights", "missing_eos_penalty")
_CLASSIFIER_OPTIONS = ("reward_batch_size", "reward_placement", "reward_deepspeed")


@dataclass(kw_only=True)
class OnlineDPOConfig(RewardOptions, RolloutOptions, AlignmentConfig):
    """DPO on pairs of the policy's own completions, ranked as they come: https://arxiv.org/abs/2402.04792.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or one that cannot be used.
    """

    TITLE: ClassVar[str] = "Online DPO"
    method: ClassVar[str] = "online_dpo"

    learning_rate: float = option(5e-7, "Peak learning rate.")
    loss_type: str = option("sigmoid", "Loss: `sigmoid` or `ipo`.", choices=ONLINE_DPO_LOSS_TYPES)
    beta: float | list[float] = option(
        0.1,
        "Strength of the pull towards the reference; a list has one for each epoch, the last for all further ones.",
    )

    def resolve(self) -> None:
        """Check Online DPO's own options."""
        self._check_sampling()
        checks.check_lengths(self, rows_per_unit=2)
        if not self.betas or not all(beta > 0 for beta in self.betas):
            raise OptionError(f"{shown('beta', self.beta)}: must be greater than 0; set a positive number")
        if self.ref_placement == "none":
            raise OptionError("ref_placement='none': Online DPO needs a reference; set offload, sharded or replica")
        if self.stratify_labels:
            raise OptionError(
                "stratify_labels=True: Online DPO's rows have no labels to deal out evenly; leave it out"
            )
        if self.judge is not None:
            self.check_judge(self.judge)

    @property
    def betas(self) -> tuple[float, ...]:
        """The beta of each epoch, the last one also of all further epochs."""
        return tuple(self.beta) if isinstance(self.beta, list) else (self.beta,)

    @property
    def max_prompt_length(self) -> int:
        """The longest prompt, in tokens, that leaves room for a completion."""
        return self.max_length - self.max_new_tokens

    @property
    def max_completion_length(self) -> int:
        """The longest completion, in tokens."""
        return self.max_new_tokens

    @property
    def truncation_mode(self) -> str:
        """No prompt is ever cut; what the tokeniser of rows reads for all methods."""
        return "keep_end"

    def check_named(self) -> None:
        """Something must score the completions."""
        if self.reward_model_path is None and not self.reward_funcs and self.judge is None:
            raise OptionError(
                "reward_model_path=None: nothing to score completions with; set reward_model_path, reward_funcs "
                "(file.py:function) or judge"
            )

    def _check_sampling(self) -> None:
        checks.at_least(self, 1, "max_new_tokens", "rollout_batch_size", "reward_batch_size", "num_completions_to_log")
        checks.at_least(self, 2, "num_generations")
        checks.at_least(self, 0, "top_k", "log_completions", "missing_eos_penalty")
        checks.positive(self, "repetition_penalty")
        if not self.temperature > 0:
            raise OptionError(
                f"{shown('temperature', self.temperature)}: two greedy completions would be the same; set it above 0"
            )
        if not 0 < self.top_p <= 1:
            raise OptionError(f"{shown('top_p', self.top_p)}: must be above 0 and at most 1; set 1.0 for all tokens")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise OptionError(f"{shown('min_p', self.min_p)}: must be from 0 to 1; leave it out for none")
        if self.max_length <= self.max_new_tokens:
            raise OptionError(
                f"{shown('max_length', self.max_length)}: leaves no room for a prompt beside "
                f"{shown('max_new_tokens', self.max_new_tokens)}; set max_length above it"
            )

    def check_judge(self, judge: str) -> None:
        """Nothing is set that a judge would leave without effect; ``judge`` names it in messages."""
        for name in (*_REWARD_OPTIONS, *_CLASSIFIER_OPTIONS):
            if getattr(self, name) is not None:
                raise OptionError(
                    f"{shown('judge', judge)} and {shown(name, getattr(self, name))}: a judge decides by itself "
                    "which completion is better; leave one of them out"
                )
        if self.num_generations > 2:
            raise OptionError(
                f"{shown('num_generations', self.num_generations)}: a judge compares two completions; set it to 2, or "
                "score with reward_funcs or reward_model_path"
            )
