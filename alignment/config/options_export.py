"""The options of an export, for the command and for Python; importable without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from alignment.config.errors import refuse
from alignment.config.fields import Natural, option, validated


@dataclass
class ExportOptions:
    """Options of an export, described by ``deepspeed-alignment export --help``; OptionError if one is invalid."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto", "dtype of the exported weights; auto: that of the model, or that in which the adapter was trained"
    )
    base: str | None = option(None, "folder or Hub name of an adapter's base model, instead of the one it names")
    revision: str | None = option(None, "revision of an adapter's base model on the Hub")
    load_in_4bit: bool = option(
        False, "merge the adapter into dequantized 4-bit base weights, as in training (usually detected)"
    )
    load_in_8bit: bool = option(False, "the same for 8-bit base weights")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option("nf4", "quantization type of the 4-bit weights")
    use_bnb_nested_quant: bool = option(True, "whether nested quantization was used for the 4-bit weights")
    dataset_name: str | None = option(None, "file, folder or Hub name of rows to compare on [built-in texts]")
    samples: Natural = option(8, "number of rows to compare on; 0 to skip")
    max_shard_size: str = option("5GB", "maximum size of a weight file, such as 500MB")
    trust_remote_code: bool = option(False, "allow models and tokenizers to run their own Python code")

    def __post_init__(self) -> None:
        vars(self).update(validated(type(self), vars(self)))
        if not re.fullmatch(r"[1-9]\d*[KMG]i?B", self.max_shard_size):
            refuse(self, "max_shard_size", "expected a size such as 5GB or 500MB")
        if self.load_in_4bit and self.load_in_8bit:
            refuse(self, "load_in_4bit load_in_8bit", "they contradict each other; remove one of them")

    @property
    def quantization(self) -> dict[str, Any] | None:
        """Arguments of ``BitsAndBytesConfig`` for the base of an adapter; None for those that the adapter records."""
        if self.load_in_4bit:
            names = {"bnb_4bit_quant_type": self.bnb_4bit_quant_type}
            return {"load_in_4bit": True, **names, "bnb_4bit_use_double_quant": self.use_bnb_nested_quant}
        return {"load_in_8bit": True} if self.load_in_8bit else None
