"""Options of TRL's configurations, since release 0.12, that this project has none for; a group for each method."""

# ruff: noqa: RUF009 - accepted() and only() are dataclasses.field() with a reason

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alignment.config.compatibility.verdicts import accepted, only
from alignment.config.fields import ListOrKeywords, OptionalTexts

_PADDING = "Padding is masked; its width and token have no effect on results."
_MARKED = "Completions are marked by position, so no label is padded."
_DECODER = "encoder-decoder models are not supported"
_SYNC = "Applies to `sync_ref_model` only, which is refused."
_DIVERGENCE = "only the reverse KL divergence is supported"
_VLLM = "Applies to `use_vllm` only, which is refused."
_LEAVE = "leave it out"


@dataclass(kw_only=True)
class PaddingOptions:
    """Of KTO, CPO and DPO in TRL up to 0.24."""

    TITLE: ClassVar[str] = "Of TRL"

    label_pad_token_id: int = accepted(-100, _MARKED)
    padding_value: int | None = accepted(None, _PADDING)
    is_encoder_decoder: bool | None = only(None, False, reason=_DECODER, instead="use a causal language model")
    base_model_attribute_name: str = accepted("model", "The head of a supported model is found without it.")


@dataclass(kw_only=True)
class WidthOptions:
    """Of every method on given answers."""

    TITLE: ClassVar[str] = "Of TRL"

    pad_to_multiple_of: int | str | None = accepted(None, _PADDING)


@dataclass(kw_only=True)
class SyncOptions:
    """Of methods with a reference."""

    TITLE: ClassVar[str] = "Of TRL"

    ref_model_mixup_alpha: float = accepted(0.6, _SYNC)
    ref_model_sync_steps: int = accepted(512, _SYNC)


@dataclass(kw_only=True)
class KTOCompatibility(PaddingOptions, WidthOptions, SyncOptions):
    """What TRL's ``KTOConfig`` has besides."""


@dataclass(kw_only=True)
class CPOCompatibility(PaddingOptions, WidthOptions):
    """What TRL's ``CPOConfig`` has besides."""


@dataclass(kw_only=True)
class DPOCompatibility(PaddingOptions, WidthOptions, SyncOptions):
    """What TRL's ``DPOConfig`` has besides."""

    TITLE: ClassVar[str] = "Of TRL"

    pad_token: str | None = accepted(None, _PADDING)
    padding_free: bool = accepted(False, "Affects speed only; `max_tokens_per_batch` reduces padding.")
    use_logits_to_keep: bool = accepted(False, "Log-probs are always computed at completion positions only.")
    force_use_ref_model: bool = accepted(False, "A given reference model is always used, with adapters too.")
    loss_weights: list[float] | None = only(
        None, [1.0], reason="combining several losses is not supported", instead="set one loss_type"
    )
    ld_alpha: float | None = only(None, 1.0, reason="length desensitization (LD-DPO) is not supported", instead=_LEAVE)
    f_divergence_type: str = only("reverse_kl", reason=_DIVERGENCE, instead=_LEAVE)
    f_alpha_divergence_coef: float = accepted(0.5, "Applies to the alpha divergence only, which is refused.")
    use_weighting: bool = only(False, reason="weighting of pairs (WPO) is not supported", instead=_LEAVE)
    discopop_tau: float = accepted(0.05, "Applies to the discopop loss only, which is refused.")
    reference_free: bool = only(False, reason="DPO needs a reference model", instead="set method: cpo, which has none")
    rpo_alpha: float | None = only(
        None,
        reason="an NLL term on chosen answers is part of CPO",
        instead="set method: cpo and cpo_alpha",
    )
    max_target_length: int | None = only(
        None, reason=_DECODER, instead="use a causal language model and max_completion_length"
    )
    tools: ListOrKeywords = only(
        None, [], reason="tools are read from each row", instead="add a tools column to the data"
    )


@dataclass(kw_only=True)
class RewardCompatibility(WidthOptions):
    """What TRL's ``RewardConfig`` has besides."""


@dataclass(kw_only=True)
class SFTCompatibility(WidthOptions):
    """What TRL's ``SFTConfig`` has besides."""

    TITLE: ClassVar[str] = "Of TRL"

    dataset_batch_size: int | None = accepted(1000, "Affects speed only.")
    num_of_sequences: int = accepted(1024, "Applies to packing only, which is refused.")
    chars_per_token: float = accepted(3.6, "Applies to packing only, which is refused.")
    shuffle_dataset: bool = accepted(
        False, "Every epoch is shuffled by the seed; set `train_sampling_strategy` to change that."
    )
    packing: bool = only(False, reason="packing is not supported yet", instead="set max_tokens_per_batch")
    packing_strategy: str = accepted("bfd", "Applies to packing only, which is refused.")
    eval_packing: bool | None = only(
        None, False, reason="packing is not supported yet", instead="set max_tokens_per_batch"
    )
    padding_free: bool = accepted(False, "Affects speed only; `max_tokens_per_batch` reduces padding.")


@dataclass(kw_only=True)
class OnlineDPOCompatibility(WidthOptions):
    """What TRL's ``OnlineDPOConfig`` has besides."""

    TITLE: ClassVar[str] = "Of TRL"

    use_vllm: bool = only(
        False, reason="completions are generated by transformers", instead="set rollout_backend: continuous"
    )
    gpu_memory_utilization: float | None = accepted(None, _VLLM)
    vllm_model_impl: str = accepted("vllm", _VLLM)
    vllm_guided_decoding_regex: str | None = accepted(None, _VLLM)
    vllm_structured_outputs_regex: str | None = accepted(None, _VLLM)
    vllm_gpu_memory_utilization: float | None = accepted(0.55, _VLLM)
    vllm_mode: str = accepted("colocate", _VLLM)
    vllm_server_base_url: str | None = accepted(None, _VLLM)
    vllm_server_host: str = accepted("0.0.0.0", _VLLM)
    vllm_server_port: int = accepted(8000, _VLLM)
    vllm_server_timeout: float = accepted(240.0, _VLLM)
    vllm_group_port: int = accepted(51216, _VLLM)
    vllm_tensor_parallel_size: int = accepted(1, _VLLM)
    vllm_enable_sleep_mode: bool = accepted(False, _VLLM)
    cache_implementation: OptionalTexts = only(
        None, "dynamic", reason="the rollout manages its own cache", instead="set rollout_backend"
    )
