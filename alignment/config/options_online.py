"""The options of a method that generates its own completions and has them scored: the groups, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from alignment.config import checks
from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.config.options_rollout import RewardOptions, RolloutOptions
from alignment.config.refusals import shown

_REWARD_OPTIONS = ("reward_model_path", "reward_funcs", "reward_weights", "missing_eos_penalty")
_CLASSIFIER_OPTIONS = ("reward_batch_size", "reward_placement", "reward_deepspeed")


@dataclass(kw_only=True)
class OnlineOptions(RewardOptions, RolloutOptions, AlignmentConfig):
    """What such methods share; a method derives its own options from it, and calls :meth:`check_online`."""

    def check_online(self) -> None:
        """Check sampling, lengths and who scores."""
        self._check_sampling()
        checks.check_lengths(self, rows_per_unit=2)
        if self.judge is not None:
            self.check_judge(self.judge)

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
