"""Liger: which model types it has layer kernels for, and putting them into one model.

Liger changes transformers' modelling files for the whole process. Here a model's own layers get the kernels, and the
files stay as they were for every other model of the process: an export compares models in host memory, where no Triton
kernel runs.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

LOSSES = ("cross_entropy", "fused_linear_cross_entropy")


def kernels_by_type() -> dict[str, frozenset[str]]:
    """The model types that the installed Liger has kernels for, and the names of these kernels, losses included.

    The names are the parameters of a function per type, which Liger finds in a table; its own entry point leaves a
    type or a name that it does not know aside without a word. Seen with liger-kernel 0.8.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return {
        name: frozenset(inspect.signature(function).parameters) - {"model", "kwargs"}
        for name, function in MODEL_TYPE_TO_APPLY_LIGER_FN.items()
    }


def left_out(model_type: str) -> frozenset[str]:
    """The kernels that Liger leaves out of a type unless they are asked for.

    Then most of its functions put nothing in and log a warning, and others raise ``NotImplementedError``: it has no
    such kernel that fits. Seen with liger-kernel 0.8.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    parameters = inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]).parameters.values()
    return frozenset(each.name for each in parameters if each.default is False) - {*LOSSES}


def put_into(model: PreTrainedModel, kernels: Mapping[str, bool]) -> None:
    """Replace the forward of a model's layers by Liger's kernels; its losses are left out.

    ``apply_liger_kernel_to_…`` is public, but not which of them is for a type, and each also puts its classes and its
    rotary embedding into the modelling file, and Nemotron's its activation into the table of all models. The classes
    and the activation are put back; the rotary embedding, which is a function of the file, calls the kernel on a GPU
    and transformers' own on a CPU. Seen with liger-kernel 0.8, transformers 5.23.

    Args:
        model: of one of the types of :func:`kernels_by_type`.
        kernels: which ones, by their names; all others are Liger's default for this type.

    Raises:
        TypeError: Liger does not know this class, though it knows its type.
        ValueError: likewise; or a layer has another activation than the kernel, which Liger would replace unseen.
        ImportError: what the kernels of this type import is missing.
        NotImplementedError: a kernel that was asked for does not exist for this type.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from transformers.activations import ACT2FN

    file = sys.modules[type(model).__module__]
    # By dict's own method the table gives classes; its own makes an instance of each that is read.
    before, table, own = dict(vars(file)), dict(dict.items(ACT2FN)), _activations(model)
    try:
        _apply_liger_kernel_to_instance(model=model, **{**kernels, **dict.fromkeys(LOSSES, False)})
    finally:
        for name, plain in before.items():
            found = getattr(file, name)
            if found is plain:
                continue
            is_function = inspect.isfunction(plain) and not isinstance(plain, type)
            setattr(file, name, _by_device(found, plain) if is_function else plain)
        ACT2FN.update(table)
    _check_activations(model, own)


def _activations(model: nn.Module) -> dict[nn.Module, Callable[[Tensor], Tensor]]:
    """The activation of each feed-forward layer, which transformers calls ``act_fn`` or ``activation_fn``."""
    named = ((each, getattr(each, "act_fn", getattr(each, "activation_fn", None))) for each in model.modules())
    return {each: function for each, function in named if callable(function)}


def _check_activations(model: nn.Module, before: Mapping[nn.Module, Callable[[Tensor], Tensor]]) -> None:
    """Compare the activations that layers had with those of the kernels that they compute by now.

    Liger looks at a configuration's activation where it builds a layer, but not where it changes one.
    """
    import torch
    import torch.nn.functional as F

    points = torch.linspace(-4, 4, 33)
    for module, own in before.items():
        kernel, theirs = module._get_name(), F.silu(points)
        if type(getattr(module, "act_fn", None)).__name__ == "LigerReLUSquared":
            kernel, theirs = "LigerReLUSquared", F.relu(points).square()
        elif "GEGLU" in kernel:
            theirs = F.gelu(points, approximate="tanh")
        if kernel.startswith("Liger") and not torch.allclose(own(points), theirs, atol=1e-5):
            raise ValueError(f"{kernel} computes another activation than the model's {type(own).__name__}")


def _by_device(kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``kernel`` for tensors on a GPU, or in Triton's interpreter, and ``plain`` for others."""
    plain = getattr(plain, "without_liger", plain)

    @functools.wraps(plain)
    def chosen(first: Any, *args: Any, **kwargs: Any) -> Any:
        on_device = first.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"
        return (kernel if on_device else plain)(first, *args, **kwargs)

    vars(chosen)["without_liger"] = plain
    return chosen
