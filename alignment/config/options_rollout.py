"""The options of methods that generate their own completions: how they are sampled, and who scores them."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from alignment.config.fields import option
from alignment.config.frozen import PLACEMENTS

ROLLOUT_BACKENDS = ("auto", "continuous", "generate", "vllm")
REWARD_PLACEMENTS = tuple(PLACEMENTS)


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
    generation_kwargs: dict[str, Any] | None = option(
        None, "Further keys of transformers' `GenerationConfig`, such as `no_repeat_ngram_size`."
    )
    rollout_backend: str = option(
        "auto",
        "What generates: `generate` (left-padded batches), `continuous` (transformers' continuous batching), or "
        "`auto`: whichever supports the model and every processor asked for and is the faster one on this device.",
        choices=ROLLOUT_BACKENDS,
    )
    rollout_batch_size: int | None = option(
        None, "Completions generated at once on each device; unset: as many as the memory for their cache allows."
    )
    ds3_gather_for_generation: bool | None = option(
        None,
        "ZeRO-3: gather the whole policy once for a rollout, or (`false`) layer by layer at every token; unset: "
        "gather if weights and cache fit in 80 % of the free memory of every device.",
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
    reward_funcs: str | list[str] | None = option(
        None, "Python functions that score completions, each as `file.py:function` or `package.module:function`."
    )
    reward_weights: list[float] | None = option(
        None, "Weights of the rewards in their sum, the reward model's first; unset: 1 each."
    )
    judge: str | None = option(
        None, "A judge of pairs in place of rewards, as `file.py:name`: (prompts, pairs) -> 0, 1 or -1 for each pair."
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
    reward_deepspeed: str | dict[str, Any] | None = option(
        None, "DeepSpeed JSON of the reward model's engine: path, name in `ds_configs/` or mapping."
    )
