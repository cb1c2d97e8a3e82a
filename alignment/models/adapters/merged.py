"""Merge the adapters of a live model into its base, to train new adapters on the merged model.

TRL below 1.0 does so if it gets both a ``PeftModel`` and a ``peft_config``. PEFT merges in the dtype of the base
model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from alignment.config.errors import OptionError, first_line, listing
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.models.adapters.kinds import KINDS
from alignment.models.quantization import is_packed

if TYPE_CHECKING:
    from peft import PeftModel

_INSTEAD = "merge them yourself and pass the merged model, or remove peft_config to continue training them"


def merge_live(live: PeftModel) -> tuple[PreTrainedModel, str]:
    """Merge the active adapter of ``live`` into its base, in place.

    Returns:
        The model without adapters, and a message for the user.

    Raises:
        OptionError: merging would round quantized weights, or is not supported for these adapters.
    """
    _check(live)
    name = live.active_adapters[0]
    kind = str(live.peft_config[name].peft_type.value)
    dropped = sorted(set(live.peft_config) - {name})
    try:
        model: PreTrainedModel = live.merge_and_unload(safe_merge=True)
    except (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise OptionError(f"peft_config: the adapters of model cannot be merged: {first_line(error)}") from error
    rounded = "" if model.dtype == torch.float32 else f" and rounded to {str(model.dtype).removeprefix('torch.')}"
    gone = f"; {listing(dropped)} of its adapters are dropped" if dropped else ""
    return model, (
        f"model: its {kind} adapter {name!r} was merged into the base model{rounded}{gone}. The adapters of "
        "peft_config are trained on the merged model and only work with it: save it as well (merge_and_unload() and "
        "save_pretrained() before training)"
    )


def _check(live: PeftModel) -> None:
    """Reject adapters if the model would not be the same after merging."""
    active = list(live.active_adapters)
    if len(active) > 1:
        raise OptionError(
            f"peft_config: model has several active adapters ({', '.join(active)}), which cannot be merged "
            f"automatically; {_INSTEAD}"
        )
    config = live.peft_config[active[0]]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise OptionError(
            f"peft_config: model has {kind} adapters, which change no weights and cannot be merged; remove either "
            "peft_config or the adapters"
        )
    if kind not in KINDS:
        raise OptionError(f"peft_config: merging the {kind} adapters of model is not supported; {_INSTEAD}")
    parameters = list(live.parameters())
    if any(map(is_packed, parameters)):
        raise OptionError(
            f"peft_config: the base weights of model are quantized, and merging would round its adapters; {_INSTEAD}"
        )
    if any(map(is_partitioned, parameters)):
        raise OptionError(
            f"peft_config: an earlier run has partitioned the weights of model (ZeRO-3), which prevents merging; "
            f"{_INSTEAD}"
        )
