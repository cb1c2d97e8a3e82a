"""Liger: the model types that it has layer kernels for, and applying them to a single model.

Liger patches transformers' modeling modules for the whole process. Here only one model's layers get the kernels, and
the modules stay unchanged for all other models of the process: an export compares models in host memory, where no
Triton kernel runs.
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
    """The model types that the installed Liger has kernels for, and the names of these kernels, including losses.

    The names are the parameters of one function per type, which Liger finds in a table; its entry point silently
    ignores unknown types and names. Seen with liger-kernel 0.8.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return {
        name: frozenset(inspect.signature(function).parameters) - {"model", "kwargs"}
        for name, function in MODEL_TYPE_TO_APPLY_LIGER_FN.items()
    }


def left_out(model_type: str) -> frozenset[str]:
    """The kernels that Liger does not apply to a type by default.

    If they are requested, most of its functions only log a warning, and others raise ``NotImplementedError``, because
    there is no such kernel. Seen with liger-kernel 0.8.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    parameters = inspect.signature(MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]).parameters.values()
    return frozenset(each.name for each in parameters if each.default is False) - {*LOSSES}


def put_into(model: PreTrainedModel, kernels: Mapping[str, bool]) -> None:
    """Replace the forward of a model's layers by Liger's kernels, without its losses.

    ``apply_liger_kernel_to_…`` is public, but not the mapping from types, and each also patches its classes and its
    rotary embedding into the modeling module, and Nemotron's its activation into the table of all models. The classes
    and the activation are restored; the rotary embedding, which is a function of the module, calls the kernel on a GPU
    and transformers' own function on a CPU. Seen with liger-kernel 0.8, transformers 5.23.

    Args:
        model: a model of one of the types of :func:`kernels_by_type`.
        kernels: kernels to enable or disable, by name; all others have Liger's default for this type.

    Raises:
        TypeError: Liger does not support this class, although it supports its type.
        ValueError: the same; or a layer has another activation than the kernel, which Liger would silently replace.
        ImportError: a dependency of the kernels of this type is missing.
        NotImplementedError: a requested kernel does not exist for this type.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from transformers.activations import ACT2FN

    file = sys.modules[type(model).__module__]
    # dict's own method returns classes; the table's own creates an instance of each.
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
    """The activation of each feed-forward layer, named ``act_fn`` or ``activation_fn`` in transformers."""
    named = ((each, getattr(each, "act_fn", getattr(each, "activation_fn", None))) for each in model.modules())
    return {each: function for each, function in named if callable(function)}


def _check_activations(model: nn.Module, before: Mapping[nn.Module, Callable[[Tensor], Tensor]]) -> None:
    """Compare the original activations of the layers with those of their new kernels.

    Liger checks the configuration's activation when it builds a layer, but not when it changes one.
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
            raise ValueError(f"{kernel} computes a different activation than the model's {type(own).__name__}")


def _by_device(kernel: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``kernel`` for tensors on a GPU or in Triton's interpreter, and ``plain`` otherwise."""
    plain = getattr(plain, "without_liger", plain)

    @functools.wraps(plain)
    def chosen(first: Any, *args: Any, **kwargs: Any) -> Any:
        on_device = first.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1"
        return (kernel if on_device else plain)(first, *args, **kwargs)

    vars(chosen)["without_liger"] = plain
    return chosen
