"""The policy as it was given, computed with the weights of the policy that trains.

Without its adapters, where these change nothing yet: that is measured when they are injected, layer by layer, because
under ZeRO-3 no more than a layer is ever whole. Otherwise with a frozen copy of them.
"""

from __future__ import annotations

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
# Relative to the largest output: what rounding alone does to one layer, such as DoRA's division by the norm it has.
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Given(NamedTuple):
    """How the policy as it was given is computed with the policy's own weights.

    Attributes:
        adapter: the name of the adapter to compute with; None: without any.
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
) -> Given | None:
    """Put adapters into a model that has its scorer's head, and let nothing else train.

    Args:
        model: loaded for an engine with ``ds_config``.
        adapters: which.
        ds_config: of the engine.
        dtype: of the adapters' weights, and of modules that are trained whole.
        seed: of their initial weights: the same on every rank, at every ZeRO stage.
        keep: whether the policy as given has to be computable ever after.

    Returns:
        How it is, or None where it was not asked for: without adapters where they change nothing yet and new ones have
        left the base as it was, which is measured layer by layer; otherwise with a frozen copy of them.

    Raises:
        OptionError: weights are trained that would not be saved; or weights of the base are trained with the adapters,
            so that both ways would follow the training.
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
    if _changes_nothing(model, adapters, before, _ROUNDING.get(dtype, 1e-5) if rounds else 0.0, dtype):
        return Given(None)
    return Given(keep_given(model, adapters, ds_config=ds_config, dtype=dtype))


def _check_saved(model: PreTrainedModel, adapters: Adapters) -> None:
    own = set(adapter_tensors(model, adapters.name, {name: name for name, _ in model.named_parameters()}).values())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in own:
            raise OptionError(
                f"model: {name} requires a gradient and is no part of the adapters, so that it would be trained and "
                "not saved; freeze it, or name its module in modules_to_save"
            )


def _check_base_frozen(model: PreTrainedModel, adapters: Adapters) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and f".{adapters.name}." not in f"{name}.":
            shown, bias = name.replace(".base_layer", ""), getattr(adapters.config, "bias", None)
            raise OptionError(
                f"ref_placement: adapter: {shown} of the base is trained as well (bias={bias!r}), so that the policy "
                "without its adapters is not the policy as given; set ref_placement to offload, sharded or replica"
            )


def _answers(model: nn.Module, names: tuple[str, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """What layers that take one tensor make of a few fixed rows; weights are gathered for one layer at a time."""
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
    """Rows that a layer can take; None where it takes something else."""
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
    """Whether every layer answers the same with its adapter as without it, and without it as ``before``.

    Every rank makes all comparisons, for they gather weights, and all ranks agree.
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
    verdict = torch.tensor(int(same), device=model.device)
    torch.distributed.all_reduce(verdict, torch.distributed.ReduceOp.MIN)
    return bool(verdict)


def _is_copy(module: Any, name: str) -> bool:
    """Whether a module that is trained whole is as the base's; true of any other module."""
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
