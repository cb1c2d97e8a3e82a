"""Layer kernels: Liger's, and those of the hub, put into a model where it is loaded and before it gets its scorer.

What is refused before anything is loaded is in ``planning.kernels``.
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
    """The type of a configuration if the installed Liger has kernels for it, else None."""
    if find_spec("liger_kernel") is None or config.model_type not in kernels_by_type():
        return None
    return str(config.model_type)


def put_liger_kernels(model: PreTrainedModel, kernels: Mapping[str, bool] | None) -> None:
    """Let a model's layers compute by Liger's kernels, in place.

    Its normalisations, feed-forward layers and rotary embedding keep their parameters: the kernels read them as
    attributes of the modules that DeepSpeed gathers, and call adapters and packed layers as modules.

    Args:
        model: just loaded, or live.
        kernels: which ones; None: all that Liger has for the type, but its losses.

    Raises:
        ModelError: Liger has no kernels for it.
    """
    target: Any = model
    if "SequenceClassification" in type(model).__name__:
        target = decoder_of(model)  # Liger knows causal language models and their decoders
    try:
        if target is None or liger_type(target.config) is None:
            raise ValueError(f"it has no kernels for a {model.config.model_type} model")
        put_into(target, kernels or {})
    except (TypeError, ValueError, AttributeError, ImportError, NotImplementedError) as error:
        raise ModelError(
            f"use_liger_kernel: Liger cannot be put into a {type(model).__name__}: {first_line(error)}; leave it out"
        ) from error


def hub_kernels(kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The arguments of ``from_pretrained``, and whether the hub's kernels are asked for among them."""
    return {name: value for name, value in kwargs.items() if name != HUB}, bool(kwargs.get(HUB))


def put_hub_kernels(model: PreTrainedModel) -> None:
    """Replace a model's layers by kernels of the hub, which are those for training where it is trained.

    ``from_pretrained`` chooses them in evaluation mode, and so without a backward pass.

    Raises:
        ModelError: they cannot be had.
    """
    training = model.training
    try:
        model.train()
        model.set_use_kernels(True)
        model.train(training)
    except (ValueError, TypeError, AttributeError, ImportError, OSError, RuntimeError) as error:
        raise ModelError(
            f"{HUB}: kernels of the hub cannot be put into a {type(model).__name__}: {first_line(error)}; leave it out"
        ) from error


def choose_hub_kernels_again(module: nn.Module) -> None:
    """Choose a model's kernels of the hub for the device and the mode that it is in by now.

    They are chosen by the device of its parameters, and a model is loaded in host memory. transformers itself chooses
    again only where a model goes from training to evaluation or back, which one that is never trained does not.

    Args:
        module: the model, or what wraps it; without such kernels nothing is done.
    """
    for model in module.modules():
        if isinstance(model, PreTrainedModel) and model.use_kernels:
            model.set_use_kernels(True)
