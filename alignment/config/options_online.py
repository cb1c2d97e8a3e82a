"""The options of a method that generates its own completions and has them scored: the groups, and their checks."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alignment.config import checks
from alignment.config.errors import OptionError, setting
from alignment.config.fields import Keywords, OptionalTexts, TextOrKeywords, option
from alignment.config.options import AlignmentConfig
from alignment.config.placement import PLACEMENTS

ROLLOUT_BACKENDS = ("auto", "continuous", "generate", "vllm")
REWARD_PLACEMENTS = tuple(PLACEMENTS)
_REWARD_OPTIONS = ("reward_model_path", "reward_funcs", "reward_weights", "missing_eos_penalty")
CLASSIFIER_OPTIONS = ("reward_batch_size", "reward_placement", "reward_deepspeed", "reward_load_in_4bit")


@dataclass(kw_only=True)
class RolloutOptions:
    """Completions sampled from the policy."""

    TITLE: ClassVar[str] = "Rollout"

    max_length: int = option(
        512, "Longest prompt and completion together, in tokens; a prompt that leaves no room is dropped, never cut."
    )
    max_new_tokens: int = option(64, "Longest completion, in tokens.")
    num_generations: int = option(
        2, "Completions sampled for each prompt; of more than 2, the best and the worst make the pair."
    )
    temperature: float = option(0.9, "Sampling temperature.")
    top_p: float = option(1.0, "Sample from the likeliest tokens that make up this probability; 1: from all.")
    top_k: int = option(0, "Sample from so many likeliest tokens; 0: from all.")
    min_p: float | None = option(
        None, "Sample from tokens at least so likely, as a share of the likeliest one's probability."
    )
    repetition_penalty: float = option(1.0, "Penalty on tokens that are there already; 1: none.")
    generation_kwargs: Keywords = option(
        None, "Further keys of transformers' `GenerationConfig`, such as `no_repeat_ngram_size`."
    )
    rollout_backend: str = option(
        "auto",
        "What generates: `generate` (left-padded batches), `continuous` (transformers' continuous batching), or "
        "`auto`: whichever supports the model and every processor asked for and is the faster one on this device.",
        choices=ROLLOUT_BACKENDS,
    )
    use_transformers_paged: bool = option(False, "Another name of `rollout_backend: continuous`.")
    rollout_batch_size: int | None = option(
        None, "Completions generated at once on each device; unset: as many as the memory for their cache allows."
    )
    ds3_gather_for_generation: bool | None = option(
        None,
        "ZeRO-3: gather the whole policy once for a rollout, or (`false`) layer by layer at every token; unset: "
        "gather if weights and cache fit in four fifths of the free memory of every device.",
    )
    log_completions: int = option(
        1, "Write prompts, completions and scores to `completions.jsonl` at every so many-th log; 0: never."
    )
    num_completions_to_log: int = option(8, "Prompts of one such table.")


@dataclass(kw_only=True)
class RewardOptions:
    """Who scores completions: a reward model and functions, or a judge of pairs."""

    TITLE: ClassVar[str] = "Rewards"

    reward_model_path: str | None = option(
        None, "Folder or hub name of a sequence classifier with one label; see method `reward`."
    )
    reward_funcs: OptionalTexts = option(
        None,
        "Python functions that score completions, each as `file.py:function` or `package.module:function`.",
        several=True,
    )
    reward_weights: list[float] | None = option(
        None, "Weights of the rewards in their sum, the reward model's first; unset: 1 each."
    )
    judge: TextOrKeywords = option(
        None,
        "A judge of pairs in place of rewards: `file.py:name` of (prompts, pairs) -> 0, 1 or -1 for each pair; or a "
        "mapping for a model at an OpenAI-compatible endpoint, such as `{base_url: http://localhost:8000/v1, model: "
        "NAME}`; or `openai`, `hf`, `pair_rm`. See docs/guides/rewards.md.",
    )
    missing_eos_penalty: float | None = option(
        None, "Subtracted from the score of a completion that did not end by itself."
    )
    reward_batch_size: int | None = option(
        None, "Sequences that the reward model scores at once; unset: twice `per_device_train_batch_size`."
    )
    reward_placement: str | None = option(
        None,
        "Where the reward model lives: `offload`, `sharded` or `replica`, as for `ref_placement`.",
        choices=REWARD_PLACEMENTS,
    )
    reward_deepspeed: TextOrKeywords = option(
        None, "DeepSpeed JSON of the reward model's engine: path, name in `ds_configs/` or mapping."
    )
    reward_load_in_4bit: bool | None = option(None, "Load the reward model in 4 bits.", switch=True)


@dataclass(kw_only=True)
class OnlineOptions(RewardOptions, RolloutOptions, AlignmentConfig):
    """What such methods share; a method derives its own options from it, and calls :meth:`check_online`."""

    def check_online(self) -> None:
        """Check sampling, lengths and who scores."""
        self._check_sampling()
        checks.check_lengths(self, rows_per_unit=2)
        if self.judge is not None:
            self.check_judge(self.judge if isinstance(self.judge, str) else str(self.judge.get("model")))

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
        if self.use_transformers_paged:
            if self.rollout_backend not in ("auto", "continuous"):
                raise OptionError(
                    f"use_transformers_paged=True and {setting('rollout_backend', self.rollout_backend)}: they "
                    "contradict each other; leave one out"
                )
            self.rollout_backend = "continuous"
        checks.at_least(self, 1, "max_new_tokens", "rollout_batch_size", "reward_batch_size", "num_completions_to_log")
        checks.at_least(self, 2, "num_generations")
        checks.at_least(self, 0, "top_k", "log_completions", "missing_eos_penalty")
        checks.positive(self, "repetition_penalty")
        if not self.temperature > 0:
            raise OptionError(
                f"{setting('temperature', self.temperature)}: two greedy completions would be the same; set it above 0"
            )
        if not 0 < self.top_p <= 1:
            raise OptionError(f"{setting('top_p', self.top_p)}: must be above 0 and at most 1; set 1.0 for all tokens")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise OptionError(f"{setting('min_p', self.min_p)}: must be from 0 to 1; leave it out for none")
        if self.max_length <= self.max_new_tokens:
            raise OptionError(
                f"{setting('max_length', self.max_length)}: leaves no room for a prompt beside "
                f"{setting('max_new_tokens', self.max_new_tokens)}; set max_length above it"
            )

    def check_judge(self, judge: str) -> None:
        """Nothing is set that a judge would leave without effect; ``judge`` names it in messages."""
        for name in (*_REWARD_OPTIONS, *CLASSIFIER_OPTIONS):
            if getattr(self, name) is not None:
                raise OptionError(
                    f"{setting('judge', judge)} and {setting(name, getattr(self, name))}: a judge decides by itself "
                    "which completion is better; leave one of them out"
                )
        if self.num_generations > 2:
            raise OptionError(
                f"{setting('num_generations', self.num_generations)}: a judge compares two completions; set it to 2, "
                "or score with reward_funcs or reward_model_path"
            )
