"""Options of TRL's configurations since release 0.12 that have no effect or are not supported here, by method."""

# ruff: noqa: RUF009 - accepted() and only() are dataclasses.field() with a reason

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alignment.config.compatibility.verdicts import accepted, only
from alignment.config.fields import ListOrKeywords

_PADDING = "Has no effect: padding is masked, whatever its width and token."
_MARKED = "Has no effect: completions are marked by position, so labels are not padded."
_DECODER = "encoder-decoder models are not supported"
_SYNC = "Applies to `sync_ref_model` only, which is not supported."
_DIVERGENCE = "the losses compare log-ratios, the rewards of the reverse KL divergence"
_VLLM = "Applies to `use_vllm` only, which is not supported."
_LEAVE = "remove it"
_BUFFER = "Has no effect: sets a buffer size of packing in TRL 0.12; rows are packed all together here."


@dataclass(kw_only=True)
class PaddingOptions:
    """Options of KTO, CPO and DPO in TRL up to 0.24."""

    TITLE: ClassVar[str] = "Options of TRL"

    label_pad_token_id: int = accepted(-100, _MARKED)
    padding_value: int | None = accepted(None, _PADDING)
    is_encoder_decoder: bool | None = only(None, False, reason=_DECODER, instead="use a causal language model")
    base_model_attribute_name: str = accepted(
        "model", "Has no effect: the head of a supported model is found automatically."
    )


@dataclass(kw_only=True)
class WidthOptions:
    """Options of all methods that train on given completions."""

    TITLE: ClassVar[str] = "Options of TRL"

    pad_to_multiple_of: int | str | None = accepted(None, _PADDING)


@dataclass(kw_only=True)
class SyncOptions:
    """Options of methods with a reference."""

    TITLE: ClassVar[str] = "Options of TRL"

    ref_model_mixup_alpha: float = accepted(0.6, _SYNC)
    ref_model_sync_steps: int = accepted(512, _SYNC)


@dataclass(kw_only=True)
class KTOCompatibility(PaddingOptions, WidthOptions, SyncOptions):
    """Further options of TRL's ``KTOConfig``."""


@dataclass(kw_only=True)
class CPOCompatibility(PaddingOptions, WidthOptions):
    """Further options of TRL's ``CPOConfig``."""


@dataclass(kw_only=True)
class DPOCompatibility(PaddingOptions, WidthOptions, SyncOptions):
    """Further options of TRL's ``DPOConfig``."""

    TITLE: ClassVar[str] = "Options of TRL"

    pad_token: str | None = accepted(None, _PADDING)
    padding_free: bool = accepted(False, "Affects speed only; set `max_tokens_per_batch` to reduce padding.")
    use_logits_to_keep: bool = accepted(
        False, "Has no effect: log-probs are always computed at the positions of completions only."
    )
    force_use_ref_model: bool = accepted(
        False, "Has no effect: a reference model that you pass is always used, even with adapters."
    )
    ld_alpha: float | None = only(
        None,
        1.0,
        reason="length desensitization (LD-DPO) weights single tokens, whose reference log-probs are not stored",
        instead="remove it, or set loss_type to sigmoid_norm, which averages log-ratios over tokens",
    )
    f_divergence_type: str = only("reverse_kl", reason=_DIVERGENCE, instead=_LEAVE)
    f_alpha_divergence_coef: float = accepted(0.5, "Applies to the alpha divergence only, which is not supported.")
    use_weighting: bool = only(
        False,
        reason="weighting of pairs (WPO) needs the squared probabilities of the vocabulary, which are not computed",
        instead=_LEAVE,
    )
    reference_free: bool = only(
        False, reason="DPO requires a reference model", instead="set method: cpo, which does not"
    )
    rpo_alpha: float | None = only(
        None,
        reason="an NLL term on chosen completions is a loss of its own",
        instead="set loss_type to [sigmoid, sft], and loss_weights to [1.0, rpo_alpha]",
    )
    max_target_length: int | None = only(
        None, reason=_DECODER, instead="use a causal language model and max_completion_length"
    )
    tools: ListOrKeywords = only(
        None, [], reason="tools are read from each row", instead="add a tools column to the data"
    )


@dataclass(kw_only=True)
class RewardCompatibility(WidthOptions):
    """Further options of TRL's ``RewardConfig``."""


@dataclass(kw_only=True)
class SFTCompatibility(WidthOptions):
    """Further options of TRL's ``SFTConfig``."""

    TITLE: ClassVar[str] = "Options of TRL"

    dataset_batch_size: int | None = accepted(1000, "Affects speed only.")
    num_of_sequences: int = accepted(1024, _BUFFER)
    chars_per_token: float = accepted(3.6, _BUFFER)
    padding_free: bool = accepted(
        False,
        "Affects speed only: sequences of similar length are computed together and do not attend to each other; "
        "`max_length` still applies.",
    )


@dataclass(kw_only=True)
class OnlineDPOCompatibility(WidthOptions):
    """Further options of TRL's ``OnlineDPOConfig``."""

    TITLE: ClassVar[str] = "Options of TRL"

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
    cache_implementation: list[str] | str | None = only(
        None, "dynamic", reason="the rollout manages its own cache", instead="set rollout_backend"
    )
