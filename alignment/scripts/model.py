"""The arguments that say which model a script loads, in which format, and with which adapters."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from alignment.config.errors import OptionError, setting
from alignment.config.fields import option

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import BitsAndBytesConfig

_DTYPES = ("auto", "bfloat16", "float16", "float32")
_TASKS = ("CAUSAL_LM", "SEQ_CLS")


# The annotations are those that transformers' HfArgumentParser can turn into arguments.
@dataclass
class ModelConfig:
    """Which model a script loads, as TRL's class of this name.

    :func:`get_peft_config` and :func:`get_quantization_config` make of it what a trainer and ``from_pretrained`` take.

    Attributes:
        dtype: of the loaded weights. What a run computes in is decided by ``bf16`` and ``fp16`` of its options.
        torch_dtype: older name of ``dtype``; the two are always equal.
        lora_target_modules: one name is a text: PEFT knows ``all-linear``, and takes another text for a pattern.

    Raises:
        OptionError: two arguments that contradict each other, or a value that is not one of the choices.
    """

    model_name_or_path: str | None = option(None, "Folder or hub name of the model.")
    model_revision: str = option("main", "Branch, tag or commit of the model.")
    dtype: str | None = option("float32", "Format of the loaded weights.", choices=_DTYPES)
    trust_remote_code: bool = option(False, "Run Python code that comes with the model or tokenizer.")
    attn_implementation: str | None = option(None, "Attention kernel: `sdpa`, `eager`, `flash_attention_2` …")
    use_peft: bool = option(False, "Train LoRA adapters instead of the whole model.")
    lora_r: int = option(16, "Rank of the LoRA matrices.")
    lora_alpha: int = option(32, "LoRA's scale: the update is multiplied by `lora_alpha / lora_r`.")
    lora_dropout: float = option(0.05, "Dropout on the input of the adapters.")
    lora_target_modules: list[str] | None = option(None, "Modules that get an adapter; `all-linear` for every one.")
    lora_target_parameters: list[str] | None = option(None, "Parameters that get an adapter.")
    lora_modules_to_save: list[str] | None = option(None, "Modules trained and saved whole beside the adapters.")
    lora_task_type: str = option("CAUSAL_LM", "`SEQ_CLS` for a reward model.", choices=_TASKS)
    use_rslora: bool = option(False, "Rank-stabilised LoRA: scale by `lora_alpha / sqrt(lora_r)`.")
    use_dora: bool = option(False, "Weight-decomposed LoRA.")
    load_in_8bit: bool = option(False, "Load the weights in 8 bits; for adapters.")
    load_in_4bit: bool = option(False, "Load the weights in 4 bits; for adapters.")
    bnb_4bit_quant_type: str = option("nf4", "Format of the 4-bit weights.", choices=("fp4", "nf4"))
    use_bnb_nested_quant: bool = option(False, "Quantise the quantisation constants as well.")
    bnb_4bit_quant_storage: str | None = option(None, "Format that packed 4-bit weights are kept in.")
    torch_dtype: str | None = option(None, "Older name of `dtype`.", choices=_DTYPES)

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise OptionError("load_in_4bit=True and load_in_8bit=True: only one is possible; leave one out")
        for each in dataclasses.fields(self):
            value, choices = getattr(self, each.name), each.metadata.get("choices")
            if choices and value is not None and value not in choices:
                raise OptionError(f"{setting(each.name, value)}: not one of {', '.join(choices)}; set one of them")
        if self.torch_dtype is not None:
            if self.dtype not in (None, "float32", self.torch_dtype):  # the second is what nobody wrote
                raise OptionError(
                    f"{setting('torch_dtype', self.torch_dtype)}: {setting('dtype', self.dtype)} was given as well; "
                    "leave the older name out"
                )
            self.dtype = self.torch_dtype
        self.torch_dtype = self.dtype
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # type: ignore[assignment]


def get_peft_config(model_args: ModelConfig) -> PeftConfig | None:
    """LoRA's configuration as PEFT has it, for a trainer's ``peft_config``; None without ``use_peft``.

    Raises:
        OptionError: PEFT is not installed.
    """
    if not model_args.use_peft:
        _warn_without(model_args, "lora_", "use_peft")
        return None
    if find_spec("peft") is None:
        raise OptionError("use_peft=True: peft is not installed; pip install peft, or leave it out")
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
    """How bitsandbytes is to keep the weights, for ``from_pretrained`` or ``model_init_kwargs``; None: as they are.

    Without a 16-bit ``dtype`` a trainer that loads the model multiplies in the format that its run computes in.
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
    """``device_map`` that puts a quantised model whole on this process's GPU; None where there is none."""
    import torch

    from alignment.engines.launch_env import local_rank

    return {"": local_rank()} if torch.cuda.is_available() else None


def _warn_without(model_args: Any, prefix: str, switch: str) -> None:
    """TRL's scripts go on with arguments that have no effect; the run is another one than was meant."""
    for each in dataclasses.fields(model_args):
        value = getattr(model_args, each.name)
        if each.name.startswith(prefix) and value != each.default:
            warnings.warn(
                f"{setting(each.name, value)}: has no effect without {switch}; set {switch}: true", stacklevel=3
            )
            return
