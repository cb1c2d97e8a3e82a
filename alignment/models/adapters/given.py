"""Compute the initial policy with the weights of the policy being trained.

If new adapters have no effect yet, the initial policy is the model with its adapters disabled. This is verified layer
by layer when they are injected, because ZeRO-3 gathers only one layer at a time. Otherwise a frozen copy of the
adapters is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import deepspeed
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.config.errors import OptionError
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.internals.peft import computing_with
from alignment.models.adapters.injection import inject, keep_given
from alignment.models.adapters.record import Adapters, adapter_tensors

_PROBE_ROWS = 3
# Rounding error of one layer relative to its largest output, such as from DoRA's division by the norm of the weights.
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Given(NamedTuple):
    """How the initial policy is computed with the policy's weights.

    Attributes:
        adapter: name of the adapter to use; None: disable all adapters.
    """

    adapter: str | None


def equip(
    model: PreTrainedModel,
    adapters: Adapters,
    *,
    ds_config: dict[str, Any],
    dtype: torch.dtype,
    seed: int,
    keep: bool,
    agreed: Callable[[bool], bool],
) -> Given | None:
    """Inject adapters into a model whose head has been replaced by its scorer, and freeze everything else.

    Args:
        model: a model loaded for an engine with ``ds_config``.
        adapters: the adapters to inject.
        ds_config: configuration of the engine.
        dtype: dtype of the adapters' weights and of fully trained modules.
        seed: seed of their initial weights, which are the same on every rank and at every ZeRO stage.
        keep: whether the initial policy must remain computable.
        agreed: collective that returns whether its argument is true on all ranks.

    Returns:
        How to compute the initial policy, or None if ``keep`` is False. If new adapters have no effect and injecting
        them has not changed the base model, which is verified layer by layer, it is computed without adapters;
        otherwise with a frozen copy of them.

    Raises:
        OptionError: weights would be trained but not saved, or weights of the base model are trained as well, so that
            the initial policy could not be restored.
    """
    there = dict(model.named_modules())
    measured = tuple(name for name in adapters.layers if name in there) if keep and adapters.are_new else ()
    before = _answers(model, measured, dtype)
    inject(model, adapters, ds_config=ds_config, dtype=dtype, seed=seed)
    _check_saved(model, adapters)
    if not keep:
        return None
    if adapters.reference is not None:
        return Given(adapters.reference)
    _check_base_frozen(model, adapters)
    rounds = adapters.are_new and (getattr(adapters.config, "use_dora", False) or adapters.kind == "OFT")
    if agreed(_changes_nothing(model, adapters, before, _ROUNDING.get(dtype, 1e-5) if rounds else 0.0, dtype)):
        return Given(None)
    return Given(keep_given(model, adapters, ds_config=ds_config, dtype=dtype))


def _check_saved(model: PreTrainedModel, adapters: Adapters) -> None:
    own = set(adapter_tensors(model, adapters.name, {name: name for name, _ in model.named_parameters()}).values())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in own:
            raise OptionError(
                f"model: {name} requires a gradient but does not belong to the adapters, so it would be trained but "
                "not saved; freeze it, or add its module to modules_to_save"
            )


def _check_base_frozen(model: PreTrainedModel, adapters: Adapters) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and f".{adapters.name}." not in f"{name}.":
            shown, bias = name.replace(".base_layer", ""), getattr(adapters.config, "bias", None)
            raise OptionError(
                f"ref_placement: adapter: {shown} of the base model is also trained (bias={bias!r}), so the policy "
                "without its adapters is not the initial policy; set ref_placement to offload, sharded or replica"
            )


def _answers(model: nn.Module, names: tuple[str, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the outputs of layers for a few fixed rows, gathering the weights of one layer at a time."""
    found = {}
    training = model.training
    model.eval()
    try:
        for name in names:
            layer = cast("Any", model.get_submodule(name))
            divided = [parameter for parameter in layer.parameters() if is_partitioned(parameter)]
            with torch.no_grad(), deepspeed.zero.GatheredParameters(divided, enabled=bool(divided)):
                rows = _rows_for(layer, dtype)
                if rows is not None:
                    found[name] = layer(rows).cpu()
    finally:
        model.train(training)
    return found


def _rows_for(layer: Any, dtype: torch.dtype) -> Tensor | None:
    """Return input rows for a layer, or None if its input is not known."""
    where = next(layer.parameters()).device
    base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
    if isinstance(base, nn.Embedding):
        return torch.arange(_PROBE_ROWS, device=where) % base.num_embeddings
    width = getattr(base, "in_features", None) or getattr(base, "nx", None)
    if width is None:
        return None
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_PROBE_ROWS, width, generator=generator).to(where, dtype)


def _changes_nothing(
    model: PreTrainedModel, adapters: Adapters, before: dict[str, Tensor], rounding: float, dtype: torch.dtype
) -> bool:
    """Return whether each layer's outputs with and without its adapter are equal, and the latter equal ``before``.

    Every rank makes all comparisons, because they gather weights.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = tuple(name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer))
    with computing_with(model, None):
        without = _answers(model, layers, dtype)
    same = set(without) == set(layers) and all(torch.equal(without[name], before[name]) for name in before)
    for name, answer in _answers(model, layers, dtype).items():
        plain = without[name].float()
        same &= torch.allclose(answer.float(), plain, rtol=0, atol=rounding * float(plain.abs().max()))
    for module in model.modules():
        same &= _is_copy(module, adapters.name)
    return same


def _is_copy(module: Any, name: str) -> bool:
    """Return whether a fully trained module still equals the base model's; True for all other modules."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict) or name not in copies:
        return True
    pairs = zip(module.original_module.parameters(), copies[name].parameters())
    same = True
    for original, copied in pairs:
        divided = [parameter for parameter in (original, copied) if is_partitioned(parameter)]
        with deepspeed.zero.GatheredParameters(divided, enabled=bool(divided)):
            same &= torch.equal(original.to(copied.dtype), copied)
    return same
