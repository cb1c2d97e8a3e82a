"""Arguments for the model that a script loads, its dtype, quantization and adapters."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from alignment.config.errors import OptionError, setting
from alignment.config.fields import option, validated

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig

Dtype: TypeAlias = Literal["auto", "bfloat16", "float16", "float32"]


# transformers' HfArgumentParser can convert these annotations to arguments.
@dataclass
class ModelConfig:
    """The model that a script loads, like TRL's class of this name.

    Pass it to :func:`get_peft_config` for a trainer and to :func:`get_quantization_config` for ``from_pretrained``.

    Attributes:
        dtype: dtype of the loaded weights. The compute dtype of a run is set by its options ``bf16`` and ``fp16``.
        torch_dtype: older name of ``dtype``; always equal to it.
        lora_target_modules: a single name becomes a string, which PEFT treats as ``all-linear`` or as a pattern.

    Raises:
        OptionError: two arguments contradict each other, or a value is not among the choices.
    """

    model_name_or_path: str | None = option(None, "Folder or Hub name of the model.")
    model_revision: str = option("main", "Branch, tag or commit of the model.")
    dtype: Dtype | None = option("float32", "Dtype of the loaded weights.")
    trust_remote_code: bool = option(False, "Allow models and tokenizers to run their own Python code.")
    attn_implementation: str | None = option(
        None, "Attention implementation: `sdpa`, `eager`, `flash_attention_2` or any other in transformers."
    )
    use_peft: bool = option(False, "Train LoRA adapters instead of the full model.")
    lora_r: int = option(16, "Rank of the LoRA matrices.")
    lora_alpha: int = option(32, "Scale of LoRA: the update is multiplied by `lora_alpha / lora_r`.")
    lora_dropout: float = option(0.05, "Dropout probability of the adapters' inputs.")
    lora_target_modules: list[str] | str | None = option(
        None, "Names of the modules to adapt; `all-linear` for all linear layers.", several=True
    )
    lora_target_parameters: list[str] | None = option(None, "Names of parameters to adapt.")
    lora_modules_to_save: list[str] | None = option(None, "Modules to train fully and save with the adapters.")
    lora_task_type: Literal["CAUSAL_LM", "SEQ_CLS"] = option(
        "CAUSAL_LM", "Task type of PEFT: `SEQ_CLS` for a reward model."
    )
    use_rslora: bool = option(False, "Rank-stabilized LoRA: scale by `lora_alpha / sqrt(lora_r)`.")
    use_dora: bool = option(False, "Weight-decomposed LoRA (DoRA).")
    load_in_8bit: bool = option(False, "Load the weights in 8-bit, to train adapters.")
    load_in_4bit: bool = option(False, "Load the weights in 4-bit, to train adapters.")
    bnb_4bit_quant_type: Literal["fp4", "nf4"] = option("nf4", "Quantization type of 4-bit weights.")
    use_bnb_nested_quant: bool = option(False, "Also quantize the quantization constants of 4-bit weights.")
    bnb_4bit_quant_storage: str | None = option(None, "Storage dtype of packed 4-bit weights.")
    torch_dtype: Dtype | None = option(None, "Older name of `dtype`.")

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise OptionError("load_in_4bit=True and load_in_8bit=True contradict each other; remove one of them")
        vars(self).update(validated(type(self), vars(self)))
        if self.torch_dtype is not None:
            if self.dtype not in (None, "float32", self.torch_dtype):  # float32 is the default
                raise OptionError(
                    f"{setting('torch_dtype', self.torch_dtype)} and {setting('dtype', self.dtype)} contradict each "
                    "other: torch_dtype is an alias of dtype; remove torch_dtype"
                )
            self.dtype = self.torch_dtype
        self.torch_dtype = self.dtype
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]


def get_peft_config(model_args: ModelConfig) -> PeftConfig | None:
    """Return PEFT's ``LoraConfig`` for the argument ``peft_config`` of a trainer, or None without ``use_peft``.

    Raises:
        OptionError: PEFT is not installed.
    """
    if not model_args.use_peft:
        _warn_without(model_args, "lora_", "use_peft")
        return None
    if find_spec("peft") is None:
        raise OptionError("use_peft=True requires peft; run pip install peft, or remove use_peft")
    from peft import LoraConfig

    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        bias="none",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """Return the quantization for ``from_pretrained`` or ``model_init_kwargs``, or None without quantization.

    If ``dtype`` is not a 16-bit dtype and a trainer loads the model, 4-bit layers use the compute dtype of the run.
    """
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    if not model_args.load_in_4bit:
        _warn_without(model_args, "bnb_", "load_in_4bit")
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=None if model_args.dtype == "auto" else model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """Return a ``device_map`` that places a quantized model on this process's GPU, or None without a GPU."""
    import torch

    from alignment.run.ranks import local_rank, prepare_environment

    prepare_environment()
    return {"": local_rank()} if torch.cuda.is_available() else None


def _warn_without(model_args: Any, prefix: str, switch: str) -> None:
    """Warn about arguments that have no effect, which TRL's scripts ignore silently."""
    for each in dataclasses.fields(model_args):
        value = getattr(model_args, each.name)
        if each.name.startswith(prefix) and value != each.default:
            warnings.warn(
                f"{setting(each.name, value)}: has no effect without {switch}; set {switch}: true", stacklevel=3
            )
            return
