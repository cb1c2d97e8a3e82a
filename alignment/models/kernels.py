"""Install layer kernels, Liger's or those of the Hub, after a model is loaded and before its scorer is created.

``planning.kernels`` rejects unsupported settings before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from alignment.config.errors import ModelError, first_line
from alignment.internals.liger import kernels_by_type, put_into
from alignment.models.architectures import decoder_of

HUB = "use_kernels"  # the argument of ``from_pretrained``


def liger_type(config: PretrainedConfig) -> str | None:
    """Return the model type of a configuration if the installed Liger has kernels for it, else None."""
    if find_spec("liger_kernel") is None or config.model_type not in kernels_by_type():
        return None
    return str(config.model_type)


def put_liger_kernels(model: PreTrainedModel, kernels: Mapping[str, bool] | None) -> None:
    """Patch a model's layers in place with Liger's kernels.

    The normalization layers, the feed-forward layers and the rotary embedding keep their parameters: the kernels read
    them as attributes of the modules that DeepSpeed gathers, and call adapters and quantized layers as modules.

    Args:
        model: A newly loaded model, or a model object passed by the user.
        kernels: Which kernels to use. None: all that Liger has for the model type, except its losses.

    Raises:
        ModelError: Liger has no kernels for the model.
    """
    target: Any = model
    if "SequenceClassification" in type(model).__name__:
        target = decoder_of(model)  # Liger supports causal language models and their decoders
    try:
        if target is None or liger_type(target.config) is None:
            raise ValueError(f"it has no kernels for {model.config.model_type} models")
        put_into(target, kernels or {})
    except (TypeError, ValueError, AttributeError, ImportError, NotImplementedError) as error:
        raise ModelError(
            f"use_liger_kernel: Liger cannot patch {type(model).__name__}: {first_line(error)}; remove "
            "use_liger_kernel"
        ) from error


def hub_kernels(kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the arguments of ``from_pretrained`` without ``use_kernels``, and the value of ``use_kernels``."""
    return {name: value for name, value in kwargs.items() if name != HUB}, bool(kwargs.get(HUB))


def put_hub_kernels(model: PreTrainedModel) -> None:
    """Replace a model's layers with kernels of the Hub that support training.

    ``from_pretrained`` would select kernels for evaluation mode, which may have no backward pass.

    Raises:
        ModelError: The kernels cannot be loaded or do not fit the model.
    """
    training = model.training
    try:
        model.train()
        model.set_use_kernels(True)
        model.train(training)
    except (ValueError, TypeError, AttributeError, ImportError, OSError, RuntimeError) as error:
        raise ModelError(
            f"{HUB}: kernels of the Hub cannot be used with {type(model).__name__}: {first_line(error)}; remove {HUB}"
        ) from error


def choose_hub_kernels_again(module: nn.Module) -> None:
    """Select a model's kernels of the Hub again, for its current device and mode.

    transformers selects kernels by the device of the parameters, and live models may be in host memory. It only
    selects them again when a model switches between training and evaluation mode, which frozen models never do.

    Args:
        module: The model or a module that wraps it. Models without kernels of the Hub are not changed.
    """
    for model in module.modules():
        if isinstance(model, PreTrainedModel) and model.use_kernels:
            model.set_use_kernels(True)
