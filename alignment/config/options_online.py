"""Options of online methods, which generate completions and have them scored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Ge, Gt, Le

from alignment.config import checks
from alignment.config.errors import OptionError, refuse, setting
from alignment.config.fields import Count, Free, Keywords, Natural, NotNegative, Positive, option, words
from alignment.config.options import AlignmentConfig

FrozenPlacement: TypeAlias = Literal["offload", "sharded", "replica"]
_REWARD_OPTIONS = ("reward_model_path", "reward_funcs", "reward_weights", "missing_eos_penalty")
_SERVER = words("vllm_server_base_url vllm_server_host vllm_server_port")
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
    rollout_backend: Literal["auto", "continuous", "generate", "vllm"] = option(
        "auto",
        "`generate` (left-padded batches), `continuous` (transformers' continuous batching), `auto` (one of them), or "
        "`vllm` (a server; see docs/guides/vllm.md).",
    )
    use_transformers_paged: bool = option(False, "Alias of `rollout_backend: continuous`.")
    rollout_batch_size: Count | None = option(None, "Completions per batch. Defaults to as many as fit in memory.")
    ds3_gather_for_generation: Free[bool | None] = option(
        None, "With ZeRO-3, gather the policy per rollout (`true`) or layer by layer. Default: if it fits."
    )
    use_vllm: bool = option(False, "Alias of `rollout_backend: vllm`.")
    vllm_mode: Free[Literal["server", "colocate"]] = option(
        "server", "`server`: you run it (`vllm-serve`). `colocate`: each rank starts one on its own device."
    )
    vllm_server_base_url: Free[str | None] = option(
        None, "Address of the server, such as `http://127.0.0.1:8000`. Replaces `vllm_server_host` and `_port`."
    )
    vllm_server_host: Free[str] = option("127.0.0.1", "Host of the server.")
    vllm_server_port: Free[Annotated[int, Ge(1), Le(65535)]] = option(8000, "Port of the server.")
    vllm_server_timeout: Free[Positive] = option(
        240.0, "Seconds in which the server has to start or to recover, and to answer a request."
    )
    vllm_gpu_memory_utilization: Free[Annotated[float, Gt(0), Le(1)] | None] = option(
        None,
        "Share of the GPU's memory for the server. Default: 0.55 if colocated; otherwise vLLM's.",
        older=("gpu_memory_utilization",),
    )
    vllm_tensor_parallel_size: Free[Count] = option(1, "Number of GPUs of the server, which `vllm-serve` requests.")
    vllm_max_model_length: Free[Count | None] = option(None, "The server's context length. Default: `max_length`.")
    vllm_model_impl: Free[Literal["auto", "transformers", "vllm"]] = option(
        "vllm", "Implementation of the model in the server, see `--model-impl` of `vllm serve`."
    )
    vllm_enable_sleep_mode: Free[bool | None] = option(
        None, "Free the GPU memory of a colocated server between rollouts. Default: on a GPU.", switch=True
    )
    vllm_executable: Free[str] = option("vllm", "The program `vllm`, which may be in an environment of its own.")
    vllm_weights_folder: Free[str | None] = option(
        None, "Folder for the weights that the server reads; shared with its host. Default: one in `/dev/shm`."
    )
    vllm_allow_base_mismatch: Free[bool] = option(
        False, "Generate with a server whose base weights are not quantized as the policy's are."
    )
    log_completions: Free[Natural] = option(1, "Write completions to `completions.jsonl` every N logs. 0: never.")
    num_completions_to_log: Free[Count] = option(8, "Number of prompts to write each time.")


VLLM_OPTIONS = tuple(name for name in RolloutOptions.__annotations__ if name.startswith("vllm_"))


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

    TRL_DEFAULTS: ClassVar[Mapping[str, str]] = {
        **AlignmentConfig.TRL_DEFAULTS,
        "vllm_mode": "colocate",
        "vllm_server_host": "0.0.0.0",
        "vllm_gpu_memory_utilization": "0.55",
        "ds3_gather_for_generation": "true",
    }

    def resolve(self) -> None:
        """Translate ``use_transformers_paged`` and ``use_vllm`` to ``rollout_backend``."""
        if self.use_transformers_paged and self.rollout_backend not in ("auto", "continuous"):
            refuse(self, "use_transformers_paged rollout_backend", "they contradict each other; remove one of them")
        if self.use_transformers_paged:
            self.rollout_backend = "continuous"
        if self.use_vllm and self.rollout_backend not in ("auto", "vllm"):
            refuse(self, "use_vllm rollout_backend", "they contradict each other; remove one of them")
        if self.use_vllm:
            self.rollout_backend = "vllm"

    def check(self) -> None:
        """Check the options for sampling, lengths and scoring."""
        self._check_vllm()
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

    def _check_vllm(self) -> None:
        """Reject options that have no effect with, or without, this use of vLLM, unless they are TRL's defaults."""
        if re.fullmatch(r"https?://(\[[0-9a-fA-F:]+\]|[^/@:\s]+)(:\d+)?", self.vllm_url) is None:
            why = "expected http://HOST:PORT, without a path or password; set the server's key as VLLM_API_KEY"
            raise OptionError(f"vllm_server_base_url: {why}")
        uses, colocated = self.rollout_backend == "vllm", self.vllm_mode == "colocate"
        inert: tuple[str, ...] = VLLM_OPTIONS
        if uses:
            inert = _SERVER if colocated else ("vllm_enable_sleep_mode",)
            inert += ("rollout_batch_size", *(_SERVER[1:] if self.vllm_server_base_url else ()))
        for name in inert:
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if value and value != default and str(value) != self.TRL_DEFAULTS.get(name):
                used = f"rollout_backend: {self.rollout_backend}{f', vllm_mode: {self.vllm_mode}' if uses else ''}"
                refuse(self, name, f"has no effect with {used}; remove it")
        if not uses:
            return
        if self.ds3_gather_for_generation is False:
            refuse(self, "ds3_gather_for_generation rollout_backend", "vLLM has whole weights; remove the first")
        if self.vllm_enable_sleep_mode and self.use_cpu:
            refuse(self, "vllm_enable_sleep_mode use_cpu", "vLLM sleeps on GPUs only; remove the first")
        if colocated and self.vllm_tensor_parallel_size > 1:
            refuse(self, "vllm_tensor_parallel_size", "a colocated server has one device; set vllm_mode: server")
        if self.vllm_max_model_length is not None and self.vllm_max_model_length < self.max_length:
            refuse(self, "vllm_max_model_length max_length", "completions would be cut; remove the first")

    @property
    def vllm_url(self) -> str:
        """Address of the server of ``vllm_mode: server``."""
        host = "127.0.0.1" if self.vllm_server_host == "0.0.0.0" else self.vllm_server_host
        return (self.vllm_server_base_url or f"http://{host}:{self.vllm_server_port}").rstrip("/")

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
