"""The options that say which model, which reference, in which precision, and with which adapters."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from alignment.config.fields import option
from alignment.config.placement import PLACEMENTS

REF_PLACEMENTS = ("none", "adapter", *PLACEMENTS, "precomputed")
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(kw_only=True)
class ModelOptions:
    """The policy and the reference."""

    TITLE: ClassVar[str] = "Model and reference"

    model_name_or_path: str | None = option(
        None, "Folder or hub name of the model to train (the command line needs it)."
    )
    model_init_kwargs: dict[str, Any] | None = option(
        None, "Further keyword arguments for `from_pretrained` of the policy (JSON on the command line)."
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with the model or tokenizer.")
    attn_implementation: str | None = option(None, "Attention kernel: `sdpa`, `eager`, `flash_attention_2` …")
    ref_model_name_or_path: str | None = option(None, "Reference model; unset: the policy as it was given.")
    ref_model_init_kwargs: dict[str, Any] | None = option(
        None, "Further keyword arguments for `from_pretrained` of the reference; unset: the policy's."
    )
    ref_placement: str | None = option(
        None,
        "Where the reference lives: `offload` (ZeRO-3, parameters in host memory; the default on a GPU), `sharded` "
        "(ZeRO-3 on the device), `replica` (a whole copy; the default on CPU).",
        choices=REF_PLACEMENTS,
    )
    ref_deepspeed: str | dict[str, Any] | None = option(
        None, "DeepSpeed JSON of the reference engine: path, name in `ds_configs/` or mapping; unset: by placement."
    )
    disable_dropout: bool = option(True, "Set every dropout of policy and reference to 0.")
    router_aux_loss_coef: float | None = option(
        None, "Weight of the MoE balancing loss; unset: the model's own (needs `output_router_logits`)."
    )


@dataclass(kw_only=True)
class PrecisionOptions:
    """Number formats and the device."""

    TITLE: ClassVar[str] = "Precision and device"

    dtype: str | None = option(
        None, "Compute dtype where `bf16` and `fp16` are unset; `auto` or unset: by the machine.", choices=DTYPES
    )
    bf16: bool | None = option(None, "Compute in bfloat16; unset: yes on a GPU that supports it, no (fp32) on CPU.")
    fp16: bool | None = option(None, "Compute in float16 with dynamic loss scaling.")
    tf32: bool | None = option(None, "Allow TF32 in fp32 matrix products (Ampere or newer); unset: torch's setting.")
    use_cpu: bool = option(False, "Train on the CPU even where there is a GPU.")


@dataclass(kw_only=True)
class AdapterOptions:
    """LoRA and quantised base weights."""

    TITLE: ClassVar[str] = "Adapters and quantisation"

    use_peft: bool = option(False, "Train LoRA adapters instead of the whole model.")
    lora_r: int = option(16, "Rank of the LoRA matrices.")
    lora_alpha: int = option(32, "LoRA's scale: the update is multiplied by `lora_alpha / lora_r`.")
    lora_dropout: float = option(0.05, "Dropout on the input of the adapters.")
    lora_target_modules: str | list[str] | None = option(None, "Modules that get an adapter; unset: PEFT's choice.")
    lora_modules_to_save: list[str] | None = option(None, "Modules trained in full beside the adapters.")
    use_rslora: bool = option(False, "Rank-stabilised LoRA: scale by `lora_alpha / sqrt(lora_r)`.")
    use_dora: bool = option(False, "Weight-decomposed LoRA.")
    load_in_4bit: bool = option(False, "Load the base weights in 4 bits (QLoRA).")
    load_in_8bit: bool = option(False, "Load the base weights in 8 bits.")
    bnb_4bit_quant_type: str = option("nf4", "Format of the 4-bit weights.", choices=("nf4", "fp4"))
    use_bnb_nested_quant: bool = option(False, "Quantise the quantisation constants as well.")


@dataclass(kw_only=True)
class ReferenceOptions:
    """Further ways to a reference's log-probs; for methods on rows that are there before training."""

    TITLE: ClassVar[str] = "Reference"

    precompute_ref_log_probs: bool = option(False, "Compute the reference's log-probs once and keep them on disk.")
    precompute_ref_batch_size: int | None = option(None, "Batch size of that.")
    sync_ref_model: bool = option(False, "Move the reference towards the policy during training (TR-DPO).")
    ref_model_mixup_alpha: float = option(0.6, "Share of the policy in such a move.")
    ref_model_sync_steps: int = option(512, "Optimizer steps between such moves.")
