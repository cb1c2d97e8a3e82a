"""Options for the model, the reference, precision, adapters and quantization."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from alignment.compat.trl.verdicts import only
from alignment.config.errors import OptionError, is_placeholder, setting
from alignment.config.fields import (
    Count,
    Early,
    Free,
    Keywords,
    Late,
    NotNegative,
    Share,
    Shared,
    keywords,
    option,
    option_fields,
    words,
)

RefPlacement: TypeAlias = Literal["none", "adapter", "offload", "sharded", "replica", "precomputed"]
REF_PLACEMENTS: tuple[str, ...] = get_args(RefPlacement)
LORA = words(
    "lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save use_rslora"
    " use_dora"
)
FOUR_BITS = words("bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_quant_storage use_bnb_nested_quant")
# Keyword arguments of from_pretrained with the equivalent option.
_OPTIONS = {name: name for name in words("dtype attn_implementation trust_remote_code load_in_4bit load_in_8bit")}
_OPTIONS["torch_dtype"] = "dtype"


@dataclass(kw_only=True)
class ModelOptions:
    """Model and reference."""

    model_name_or_path: Free[Shared[str | None]] = option(None, "Model: a folder or Hub name. Required by commands.")
    model_init_kwargs: Keywords = option(None, "Further arguments of `from_pretrained` for the policy.", shown=False)
    trust_remote_code: Free[Shared[bool]] = option(False, "Allow models and tokenizers to run their own Python code.")
    attn_implementation: Shared[str | None] = option(None, "`sdpa`, `eager`, `flash_attention_2` or others.")
    ref_model_name_or_path: Free[str | None] = option(None, "Reference model. Defaults to the initial policy.")
    ref_model_init_kwargs: Keywords = option(None, "`model_init_kwargs` of the reference, if different.", shown=False)
    ref_placement: Free[RefPlacement | None] = option(
        None,
        "Source of the reference's log-probs: `adapter` (adapters off; the default with adapters), `replica` (on "
        "every device; the default on CPU), `sharded` (ZeRO-3), `offload` (ZeRO-3, in host memory) or `precomputed`. "
        "On GPUs, defaults to the first of `replica`, `sharded` and `offload` that fits.",
    )
    ref_deepspeed: Free[dict[str, Any] | str | None] = option(None, "DeepSpeed JSON of the reference's own engine.")
    ref_load_in_4bit: bool | None = option(None, "Load the reference in 4-bit. Defaults to the policy's.", switch=True)
    disable_dropout: Early[bool] = option(True, "Set dropout of policy, adapters and reference to 0.")
    use_liger_kernel: bool = option(
        False, "Use Liger kernels in all models. Requires a GPU and the extra `liger`.", older=("use_liger",)
    )
    liger_kernel_config: Keywords = option(None, 'Liger kernels: `{"rope": false}`. Defaults to all but fused losses.')
    use_liger_loss: Free[bool] = option(False, "Accepted for compatibility; has no effect: the head is always fused.")
    router_aux_loss_coef: NotNegative | None = option(None, "Weight of MoE models' balancing loss. Default: theirs.")


@dataclass(kw_only=True)
class PrecisionOptions:
    """Precision and device."""

    dtype: Free[Shared[Literal["auto", "bfloat16", "float16", "float32"] | None]] = option(
        None, "Compute dtype. Default: bf16, or fp16 on Volta and Turing, or fp32 on CPUs.", older=("torch_dtype",)
    )
    bf16: Free[bool | None] = option(None, "Compute in bfloat16, the default if all GPUs support it.", switch=True)
    fp16: Free[bool | None] = option(None, "Compute in float16 with dynamic loss scaling.", switch=True)
    tf32: Early[bool | None] = option(None, "Allow TF32 in fp32 matmuls. Defaults to torch's setting.", switch=True)
    use_cpu: Free[bool] = option(False, "Train on the CPU even if a GPU is available.", older=("no_cuda",))


@dataclass(kw_only=True)
class AdapterOptions:
    """Adapters and quantization."""

    use_peft: Shared[bool] = option(False, "Train LoRA adapters instead of the full model.")
    lora_r: Shared[Count] = option(16, "Rank of the LoRA matrices.")
    lora_alpha: Shared[Count] = option(32, "Scale of LoRA: the update is multiplied by `lora_alpha / lora_r`.")
    lora_dropout: Shared[Share] = option(0.05, "Dropout of the adapters' inputs, with `disable_dropout: false`.")
    lora_target_modules: Shared[str | list[str] | None] = option(
        None, "Modules to adapt, by name or as a regular expression. Defaults to all linear layers except the head."
    )
    lora_target_parameters: Shared[list[str] | None] = option(None, "Parameters to adapt, such as those of experts.")
    lora_modules_to_save: Shared[list[str] | None] = option(None, "Modules to train fully, such as `lm_head`.")
    use_rslora: Shared[bool] = option(False, "Rank-stabilized LoRA: scale by `lora_alpha / sqrt(lora_r)`.")
    use_dora: Shared[bool] = option(False, "Weight-decomposed LoRA (DoRA).")
    adapter_name_or_path: Free[str | None] = option(None, "PEFT adapter of this model to continue training.")
    model_adapter_name: str | None = option(None, "Adapter to train of a `PeftModel`. Defaults to the active one.")
    ref_adapter_name: str | None = option(None, "Adapter of a `PeftModel` as reference. Default: the initial policy.")
    load_in_4bit: Shared[bool] = option(False, "Load the base model in 4-bit (QLoRA).")
    load_in_8bit: Shared[bool] = option(False, "Load the base model in 8-bit.")
    bnb_4bit_quant_type: Shared[Literal["nf4", "fp4"]] = option("nf4", "Quantization type of 4-bit weights.")
    bnb_4bit_compute_dtype: Literal["bfloat16", "float16", "float32"] | None = option(
        None, "Dtype for computation with 4-bit weights. Defaults to the compute dtype."
    )
    bnb_4bit_quant_storage: Shared[Literal["bfloat16", "float16", "float32", "uint8"] | None] = option(
        None, "Storage dtype of packed 4-bit weights. Defaults to the compute dtype, which ZeRO-3 requires."
    )
    use_bnb_nested_quant: Shared[bool] = option(True, "Also quantize the quantization constants of 4-bit weights.")
    bnb_4bit_skip_experts: Shared[bool] = option(False, "Leave the experts of a mixture of experts unquantized.")
    merged_output_dir: Late[Free[str | None]] = option(None, "Folder for another copy, with adapters merged.")


@dataclass(kw_only=True)
class ReferenceOptions:
    """Reference."""

    precompute_ref_log_probs: bool = option(False, "Alias of `ref_placement: precomputed`.")
    precompute_ref_batch_size: Free[Count | None] = option(None, "Batch size of the pass. Default: as in evaluation.")
    sync_ref_model: bool = only(False, "a reference that follows the policy is not supported yet; remove it")


def changed(options: Any, names: Iterable[str]) -> str | None:
    """Return the first of these options that is not at its default, or None."""
    defaults = {field.name: field.default for field in option_fields(options)}
    return next((name for name in names if name in defaults and getattr(options, name) != defaults[name]), None)


def changed_lora(options: Any) -> str | None:
    """Return the first LoRA option that is not at its default, or None."""
    return changed(options, LORA)


def read_keywords(options: Any) -> None:
    """Set options from ``model_init_kwargs``, and reject conflicts with options and with ``ref_model_init_kwargs``.

    Raises:
        OptionError: an argument conflicts with an option, or with that of the other model.
    """
    for where in ("model_init_kwargs", "ref_model_init_kwargs"):
        given: Mapping[str, Any] = getattr(options, where) or {}
        own = where == "model_init_kwargs"
        if any(place in str(given.get("device_map")) for place in ("cpu", "disk", "meta")):
            instead = "remove device_map, or set deepspeed: zero3 to shard it across devices"
            raise OptionError(f"{setting(where, given)}: DeepSpeed places the model; {instead}")
        for key in (key for key in _OPTIONS if given.get(key) is not None):
            name = _OPTIONS[key] if own or key != "load_in_4bit" else "ref_load_in_4bit"
            value, present = given[key], getattr(options, name)
            if name == "dtype":
                value = str(value).removeprefix("torch.")
                if value in ("auto", "float32") and options.bf16 is not False:
                    continue  # weights are stored in float32 in any case, whatever the compute dtype
            if (own and present in (None, False)) or (name == "ref_load_in_4bit" and present is None):
                setattr(options, name, value)
            elif value not in (present, False):
                both = f"{setting(where, given)} and {setting(name, present)}"
                raise OptionError(f"{both}: {key} contradicts the option {name}; remove it from {where}")


def loading_keywords(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return the arguments to pass on to ``from_pretrained``: those that are no options and are set."""
    left = {key: value for key, value in keywords(given).items() if key not in (*_OPTIONS, "device_map")}
    if left.get("quantization_config", ...) is None:
        del left["quantization_config"]
    return {key: value for key, value in left.items() if not is_placeholder(key, value)}
