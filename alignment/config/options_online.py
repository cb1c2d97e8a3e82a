"""Options of online methods, which generate completions and have them scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Gt, Le

from alignment.config import checks
from alignment.config.errors import OptionError, refuse, setting
from alignment.config.fields import Count, Free, Keywords, Natural, NotNegative, Positive, option
from alignment.config.options import AlignmentConfig

FrozenPlacement: TypeAlias = Literal["offload", "sharded", "replica"]
_REWARD_OPTIONS = ("reward_model_path", "reward_funcs", "reward_weights", "missing_eos_penalty")
CLASSIFIER_OPTIONS = ("reward_batch_size", "reward_placement", "reward_deepspeed", "reward_load_in_4bit")


@dataclass(kw_only=True)
class RolloutOptions:
    """Rollout."""

    max_length: Annotated[int, Ge(2)] = option(
        512, "Maximum length of prompt and completion together, in tokens. Longer prompts are dropped, not truncated."
    )
    max_new_tokens: Count = option(64, "Maximum length of a completion, in tokens.")
    num_generations: Annotated[int, Ge(2)] = option(2, "Completions per prompt; the best and the worst form the pair.")
    temperature: Positive = option(0.9, "Sampling temperature.")
    top_p: Annotated[float, Gt(0), Le(1)] = option(1.0, "Total probability of the likeliest tokens to sample. 1: all.")
    top_k: Natural = option(0, "Sample from this number of most likely tokens. 0: all tokens.")
    min_p: Annotated[float, Ge(0), Le(1)] | None = option(
        None, "Least probability of a token to sample, relative to that of the most likely token. Unset: all tokens."
    )
    repetition_penalty: Positive = option(1.0, "Penalty on tokens that already occur in the sequence. 1: no penalty.")
    generation_kwargs: Keywords = option(None, "Arguments of `GenerationConfig`, such as `no_repeat_ngram_size`.")
    rollout_backend: Literal["auto", "continuous", "generate"] = option(
        "auto", "`generate` (left-padded batches), `continuous` (transformers' continuous batching) or `auto`."
    )
    use_transformers_paged: bool = option(False, "Alias of `rollout_backend: continuous`.")
    rollout_batch_size: Count | None = option(None, "Completions per batch. Defaults to as many as fit in memory.")
    ds3_gather_for_generation: Free[bool | None] = option(
        None, "With ZeRO-3, gather the policy per rollout (`true`) or layer by layer. Default: if it fits."
    )
    log_completions: Free[Natural] = option(1, "Write completions to `completions.jsonl` every N logs. 0: never.")
    num_completions_to_log: Free[Count] = option(8, "Number of prompts to write each time.")


@dataclass(kw_only=True)
class RewardOptions:
    """Rewards."""

    reward_model_path: Free[str | None] = option(None, "Reward model: a sequence classifier, as `reward` trains.")
    reward_funcs: Free[list[str] | str | None] = option(
        None, "Functions that score completions, as `file.py:function` or `package.module:function`.", several=True
    )
    reward_weights: list[float] | None = option(None, "Weights of the rewards, the model's first. Defaults to 1.")
    judge: Free[dict[str, Any] | str | None] = option(
        None,
        "Judge that compares pairs of completions, instead of rewards: `file.py:name` of a function, a mapping with "
        "the `base_url` and `model` of an endpoint, or `openai`. See docs/guides/rewards.md.",
    )
    missing_eos_penalty: NotNegative | None = option(None, "Penalty on the score of a completion that has no end.")
    reward_batch_size: Free[Count | None] = option(None, "Reward model's batch size. Default: twice the micro-batch.")
    reward_placement: Free[FrozenPlacement | None] = option(None, "Placement of the reward model, as `ref_placement`.")
    reward_deepspeed: Free[dict[str, Any] | str | None] = option(None, "DeepSpeed JSON of the reward model's engine.")
    reward_load_in_4bit: bool | None = option(None, "Load the reward model in 4-bit.", switch=True)


@dataclass(kw_only=True)
class OnlineOptions(RewardOptions, RolloutOptions, AlignmentConfig):
    """Base class of the options of online methods, whose ``resolve`` and ``check`` call those of this class."""

    def resolve(self) -> None:
        """Translate ``use_transformers_paged`` to ``rollout_backend``."""
        if self.use_transformers_paged and self.rollout_backend == "generate":
            refuse(self, "use_transformers_paged rollout_backend", "they contradict each other; remove one of them")
        if self.use_transformers_paged:
            self.rollout_backend = "continuous"

    def check(self) -> None:
        """Check the options for sampling, lengths and scoring."""
        checks.check_lengths(self, rows_per_unit=2, packed=self.max_length + self.max_new_tokens)
        if self.max_length <= self.max_new_tokens:
            new = setting("max_new_tokens", self.max_new_tokens)
            refuse(self, "max_length", f"leaves no tokens for the prompt with {new}; set a greater max_length")
        if self.judge is not None:
            self.check_judge(self.judge if isinstance(self.judge, str) else str(self.judge.get("model")))

    max_prompt_length = property(lambda self: self.max_length - self.max_new_tokens, doc="In tokens.")
    max_completion_length = property(lambda self: self.max_new_tokens, doc="In tokens.")
    # Has no effect, as prompts are not truncated; the tokenization of rows reads it for all methods.
    truncation_mode = property(lambda self: "keep_end", doc="Prompts are not truncated.")

    def check_named(self) -> None:
        """Require a reward model, a reward function or a judge."""
        if self.reward_model_path is None and not self.reward_funcs and self.judge is None:
            why = "Online DPO needs something to score completions; set it, reward_funcs (file.py:function) or judge"
            refuse(self, "reward_model_path", why)

    def check_judge(self, judge: str) -> None:
        """Reject options that have no effect with a judge; ``judge`` names it in messages."""
        for name in (*_REWARD_OPTIONS, *CLASSIFIER_OPTIONS):
            if getattr(self, name) is not None:
                both = f"{setting('judge', judge)} and {setting(name, getattr(self, name))}"
                raise OptionError(f"{both}: a judge ranks completions without rewards; remove one of them")
        if self.num_generations > 2:
            refuse(self, "num_generations", "a judge compares two completions; set it to 2, or use reward_funcs")
