"""The options that say which model, which reference, in which precision, and with which adapters."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

from alignment.config.errors import OptionError, setting
from alignment.config.fields import Keywords, Shared, TextOrKeywords, option, option_fields, sharing
from alignment.config.placement import PLACEMENTS

REF_PLACEMENTS = ("none", "adapter", *PLACEMENTS, "precomputed")
DTYPES = ("auto", "bfloat16", "float16", "float32")
_LORA = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save",
    "use_rslora", "use_dora",
)  # fmt: skip
_FOUR_BITS = (
    "bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "use_bnb_nested_quant",
)  # fmt: skip


@sharing
@dataclass(kw_only=True)
class ModelOptions:
    """The policy and the reference."""

    TITLE: ClassVar[str] = "Model and reference"

    model_name_or_path: Shared[str | None] = option(
        None, "Folder or hub name of the model to train (the command line needs it)."
    )
    model_init_kwargs: Keywords = option(
        None, "Further keyword arguments for `from_pretrained` of the policy (JSON on the command line).", shown=False
    )
    trust_remote_code: Shared[bool] = option(False, "Run Python code that comes with the model or tokenizer.")
    attn_implementation: Shared[str | None] = option(None, "Attention kernel: `sdpa`, `eager`, `flash_attention_2` …")
    ref_model_name_or_path: str | None = option(None, "Reference model; unset: the policy as it was given.")
    ref_model_init_kwargs: Keywords = option(
        None, "Further keyword arguments for `from_pretrained` of the reference; unset: the policy's.", shown=False
    )
    ref_placement: str | None = option(
        None,
        "Where the reference's log-probs come from: `adapter` (the policy without its adapters, or with a frozen copy "
        "of them; the default with adapters), `replica` (a whole copy on each device; the default on CPU), `sharded` "
        "(ZeRO-3 on the devices), `offload` (ZeRO-3, parameters in host memory), `precomputed` (computed once and "
        "kept on disk). Unset on a GPU: the first of `replica`, `sharded` and `offload` that fits, by size.",
        choices=REF_PLACEMENTS,
    )
    ref_deepspeed: TextOrKeywords = option(
        None, "DeepSpeed JSON of the reference engine: path, name in `ds_configs/` or mapping; unset: by placement."
    )
    ref_load_in_4bit: bool | None = option(
        None, "Load the reference in 4 bits; unset: as the policy, where it is the policy as given.", switch=True
    )
    disable_dropout: bool = option(True, "Set every dropout of policy and reference to 0; not that of adapters.")
    use_liger_kernel: bool = option(
        False,
        "Compute normalisations, rotary embeddings and SwiGLU or GeGLU by Liger's kernels in policy, reference and "
        'reward model (GPU; `pip install "deepspeed-alignment[liger]"`).',
        older=("use_liger",),
    )
    liger_kernel_config: Keywords = option(
        None, 'Which of Liger\'s kernels, by their names: `{"rope": false}`; unset: all but its losses.'
    )
    use_liger_loss: bool = option(False, "Accepted and without effect: log-probs come from a fused head in any case.")
    router_aux_loss_coef: float | None = option(
        None, "Weight of the MoE balancing loss; unset: the model's own (needs `output_router_logits`)."
    )


@sharing
@dataclass(kw_only=True)
class PrecisionOptions:
    """Number formats and the device."""

    TITLE: ClassVar[str] = "Precision and device"

    dtype: Shared[str | None] = option(
        None,
        "Compute dtype where `bf16` and `fp16` are unset; `auto` or unset: bf16 on GPUs that compute in it, fp16 on "
        "those that only emulate it (Volta, Turing), fp32 on CPUs.",
        choices=DTYPES,
        older=("torch_dtype",),
    )
    bf16: bool | None = option(
        None, "Compute in bfloat16; unset: where every GPU in use computes in it, and not on a CPU.", switch=True
    )
    fp16: bool | None = option(None, "Compute in float16 with dynamic loss scaling.", switch=True)
    tf32: bool | None = option(
        None, "Allow TF32 in fp32 matrix products (Ampere or newer); unset: torch's setting.", switch=True
    )
    use_cpu: bool = option(False, "Train on the CPU even where there is a GPU.", older=("no_cuda",))


@sharing
@dataclass(kw_only=True)
class AdapterOptions:
    """LoRA and quantised base weights."""

    TITLE: ClassVar[str] = "Adapters and quantisation"

    use_peft: Shared[bool] = option(False, "Train LoRA adapters instead of the whole model.")
    lora_r: Shared[int] = option(16, "Rank of the LoRA matrices.")
    lora_alpha: Shared[int] = option(32, "LoRA's scale: the update is multiplied by `lora_alpha / lora_r`.")
    lora_dropout: Shared[float] = option(
        0.05, "Dropout on the input of the adapters; `disable_dropout` leaves it alone."
    )
    lora_target_modules: Shared[str | list[str] | None] = option(
        None, "Modules that get an adapter, or one regular expression; unset: all linear layers but the head."
    )
    lora_target_parameters: Shared[list[str] | None] = option(
        None, "Parameters that get an adapter, such as the experts of a mixture: `mlp.experts.gate_up_proj`."
    )
    lora_modules_to_save: Shared[list[str] | None] = option(
        None, "Modules trained and saved whole beside the adapters, such as `lm_head`."
    )
    use_rslora: Shared[bool] = option(False, "Rank-stabilised LoRA: scale by `lora_alpha / sqrt(lora_r)`.")
    use_dora: Shared[bool] = option(False, "Weight-decomposed LoRA.")
    adapter_name_or_path: str | None = option(
        None, "Folder or hub name of a PEFT adapter of this model, to be trained further."
    )
    model_adapter_name: str | None = option(
        None, "Which adapter of a live model with several is trained; unset: the active one."
    )
    ref_adapter_name: str | None = option(
        None, "Which adapter of a live model with several is the reference; unset: the policy as given."
    )
    load_in_4bit: Shared[bool] = option(False, "Load the base weights in 4 bits (QLoRA).")
    load_in_8bit: Shared[bool] = option(False, "Load the base weights in 8 bits.")
    bnb_4bit_quant_type: Shared[str] = option("nf4", "Format of the 4-bit weights.", choices=("nf4", "fp4"))
    bnb_4bit_compute_dtype: str | None = option(
        None, "Format that 4-bit weights are multiplied in; unset: the compute dtype.", choices=DTYPES[1:]
    )
    bnb_4bit_quant_storage: Shared[str | None] = option(
        None,
        "Format that packed 4-bit weights are kept in; unset: the compute dtype, which ZeRO-3 needs.",
        choices=(*DTYPES[1:], "uint8"),
    )
    use_bnb_nested_quant: Shared[bool] = option(True, "Quantise the quantisation constants as well.")
    merged_output_dir: str | None = option(
        None, "After training, write the model with its adapters merged into it to this folder as well."
    )


@dataclass(kw_only=True)
class ReferenceOptions:
    """Further ways to a reference's log-probs; for methods on rows that are there before training."""

    TITLE: ClassVar[str] = "Reference"

    precompute_ref_log_probs: bool = option(False, "Another name for `ref_placement: precomputed`.")
    precompute_ref_batch_size: int | None = option(
        None, "Rows that `precomputed` scores at once on each device; unset: those of an evaluation batch."
    )
    sync_ref_model: bool = option(False, "Move the reference towards the policy during training (TR-DPO).")


def check_adapters(options: Any) -> None:
    """Adapters and quantisation of the options, as far as they are known without a model.

    Raises:
        OptionError: an option without effect, a value out of range, or 4- or 8-bit weights that cannot be had.
    """
    for name in ("lora_r", "lora_alpha"):
        if getattr(options, name) < 1:
            raise OptionError(f"{setting(name, getattr(options, name))}: must be at least 1; set it to 1 or more")
    if not 0 <= options.lora_dropout < 1:
        raise OptionError(f"{setting('lora_dropout', options.lora_dropout)}: must be 0 or more and below 1")
    if options.adapter_name_or_path is not None:
        changed = _changed(options, (*_LORA, "use_peft"))
        if changed not in (None, "use_peft"):
            path = setting("adapter_name_or_path", options.adapter_name_or_path)
            raise OptionError(
                f"{setting(changed, getattr(options, changed))}: has no effect with {path}, whose own settings stay; "
                "leave it out"
            )
    elif not options.use_peft and (changed := _changed(options, _LORA)):
        raise OptionError(
            f"{setting(changed, getattr(options, changed))}: has no effect without adapters; set use_peft: true"
        )
    if options.load_in_4bit and options.load_in_8bit:
        raise OptionError("load_in_4bit=True and load_in_8bit=True: only one is possible; leave one out")
    in_4bit = options.load_in_4bit or options.ref_load_in_4bit or getattr(options, "reward_load_in_4bit", False)
    if not in_4bit and (changed := _changed(options, _FOUR_BITS)):
        raise OptionError(
            f"{setting(changed, getattr(options, changed))}: has no effect without 4-bit weights; set "
            "load_in_4bit: true"
        )
    for name in ("load_in_4bit", "load_in_8bit", "ref_load_in_4bit", "reward_load_in_4bit"):
        if getattr(options, name, False) and find_spec("bitsandbytes") is None:
            raise OptionError(f"{name}=True: bitsandbytes is not installed; pip install bitsandbytes, or leave it out")


def changed_lora(options: Any) -> str | None:
    """The first option of LoRA that is not at its default."""
    return _changed(options, _LORA)


def _changed(options: Any, names: Iterable[str]) -> str | None:
    """The first of these options that is not at its default."""
    defaults = {field.name: field.default for field in option_fields(options)}
    return next((name for name in names if getattr(options, name) != defaults[name]), None)
