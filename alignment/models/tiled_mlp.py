"""Compute the MLP of each decoder layer in slices of the sequence, so that only one slice has intermediate tensors.

The slices are those of ALST (arXiv:2506.13996), of about as many tokens as the hidden states have dimensions. Each is
checkpointed: its intermediates are recomputed in the backward pass, with the same dropout masks. DeepSpeed's
``TiledMLP`` is not used: it recomputes with other masks, gives adapters no gradient if its input requires none, and
fails without a list of parameters.

Under ZeRO-3, an MLP is a leaf module: its weights are gathered once per pass, not once per slice, so that ranks with
sequences of different lengths may have different numbers of slices.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from alignment.config.errors import OptionError, first_line
from alignment.internals.deepspeed_zero3 import forget_leaf
from alignment.internals.transformers import loading
from alignment.models.architectures import decoder_of, is_mixture, shorten
from alignment.models.first_part import is_enough
from alignment.models.partitioning import decoder_layers

_SHAPE, _CUT = (2, 8), 5  # rows and tokens of the probe, and the tokens of its slices, which cut across rows
_VOCABULARY, _WIDTH = 32, 64  # of the model that is probed, which would take seconds in its own size


def tile_mlps(model: PreTrainedModel, name: str | None) -> None:
    """Compute the MLPs of a model in slices from now on, or as a whole again.

    Adapters may be injected later. Weights are not read, so they may be partitioned, or on the meta device.

    Args:
        model: the model.
        name: the name of the MLP in each decoder layer, see :func:`find_mlp`; None to compute them as a whole.

    Raises:
        OptionError: not all layers have an MLP of the same kind.
    """
    for module in filter(is_tiled, model.modules()):
        module.forward = module.forward.args[0]  # type: ignore[union-attr,method-assign]
        set_z3_leaf_module(module, False)
        forget_leaf(module)
    if name is None:
        return
    for mlp in mlps_of(model, name):
        mlp.forward = functools.partial(_in_slices, mlp.forward)
        set_z3_leaf_module(mlp, True)


def mlps_of(model: PreTrainedModel, name: str | None) -> list[Any]:
    """Return the module with this name of each decoder layer; raise OptionError if they are of different kinds."""
    mlps = [getattr(layer, str(name), None) for layer in decoder_layers(model)]
    if len({type(mlp) for mlp in mlps}) != 1 or mlps[0] is None:
        raise _refused(model.config, f"its decoder layers do not all have the same kind of {name}")
    return mlps


def is_tiled(module: nn.Module) -> bool:
    """Return whether a module is an MLP that is computed in slices."""
    return isinstance(module.forward, functools.partial) and module.forward.func is _in_slices


def _in_slices(whole: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """(..., H) -> (..., H): compute what ``whole`` does in slices of at most H tokens."""
    width = hidden.shape[-1]
    tokens = hidden.numel() // width
    count = -(-tokens // width)
    if count <= 1:
        return whole(hidden)

    def slices(states: Tensor) -> Iterable[tuple[int, Tensor]]:
        # The backward pass of split is one concatenation; that of each slice would allocate a gradient of all tokens.
        size = -(-tokens // count)
        return enumerate(states.reshape(1, tokens, width).split([size, tokens - size] if is_enough() else size, 1))

    def computed(part: Tensor, number: int) -> Tensor:
        return part * 1 if number and is_enough() else whole(part)

    if not torch.is_grad_enabled():
        return torch.cat([computed(part, number) for number, part in slices(hidden)], 1).view(hidden.shape)
    saved: Any = _Saved.apply(hidden.new_empty(0, requires_grad=True), hidden).grad_fn  # type: ignore[no-untyped-call]
    parts = dict(slices(hidden))

    def compute(_: Tensor, number: int) -> Tensor:
        if not parts:  # in the backward pass
            parts.update(slices(saved.saved_tensors[0]))
        return computed(parts.pop(number), number)

    # The recomputation of a layer ends with the last tensor that it has to save. Without these hooks, it would be
    # the last slice's, for which all others would be computed. The first argument tells the device whose random state
    # is restored.
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        states = [checkpoint(compute, hidden.new_empty(0), n, use_reentrant=False) for n in range(len(parts))]
    return torch.cat(states, 1).view(hidden.shape)


class _Saved(torch.autograd.Function):
    """Saves the hidden states once for all slices, before any of them is computed."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return anchor.new_empty(0)


def find_mlp(config: PretrainedConfig, build: Callable[[PretrainedConfig], PreTrainedModel]) -> str:
    """Return the name of the MLP in a model's decoder layers, after checking that slices give the same result.

    The check computes a model of one layer with random weights and a small vocabulary. Its MLP is the submodule that
    maps each hidden state to another one, independently of the others, and that the layer calls once.

    Args:
        config: configuration of the model, which is not changed.
        build: creates a model from a configuration.

    Raises:
        OptionError: there is no such module, or there are several.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if is_mixture(config):
        raise _refused(config, "it is a mixture of experts")
    try:
        shorten(text, 1)
        text.vocab_size, text.pad_token_id = _VOCABULARY, 0
        if isinstance(getattr(text, "intermediate_size", None), int):
            text.intermediate_size = _WIDTH
        with loading(None), torch.random.fork_rng(devices=()):
            model = build(config).float().eval()
            found = _position_wise(model)
    except Exception as error:  # of many classes, from the model's own code
        raise _refused(config, f"a model of one layer cannot be computed: {first_line(error)}") from error
    if len(found) != 1:
        raise _refused(config, f"{'several modules' if found else 'no module'} of a decoder layer can be its MLP")
    if _has_experts(decoder_layers(model)[0].get_submodule(found[0])):
        raise _refused(config, "it is a mixture of experts")
    return found[0]


def _refused(config: PretrainedConfig, why: str) -> OptionError:
    return OptionError(f"tiled_mlp: {config.model_type} models are not supported: {why}; set tiled_mlp: false")


def _has_experts(module: nn.Module) -> bool:
    named = any("expert" in name or "router" in name for name, _ in module.named_modules())
    return named or any(parameter.dim() > 2 for parameter in module.parameters())


@torch.no_grad()
def _position_wise(model: PreTrainedModel) -> list[str]:
    """Return the names of the first layer's submodules that can be its MLP."""
    layers, decoder = decoder_layers(model), decoder_of(model)
    if not layers or decoder is None:
        return []
    calls: dict[str, list[tuple[Any, ...]]] = {}

    def record(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.setdefault(name, []).append((args, kwargs, copy.deepcopy(output)))  # the layer may change it in place

    for name, module in layers[0].named_children():
        if any(True for _ in module.children()):  # neither a norm nor a single linear layer
            module.register_forward_hook(functools.partial(record, name), with_kwargs=True)
    decoder(input_ids=torch.randint(_VOCABULARY, _SHAPE), use_cache=False)
    return [name for name, seen in calls.items() if len(seen) == 1 and _same(layers[0].get_submodule(name), *seen[0])]


def _same(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> bool:
    """Return whether a call had hidden states as its only argument, and can be computed in slices."""
    if kwargs or len(args) != 1 or not isinstance(output, Tensor) or output.shape != args[0].shape:
        return False
    parts = args[0].flatten(0, -2)[None].split(_CUT, 1)
    sliced = torch.cat([module.forward(part) for part in parts], 1).view(output.shape)
    return bool((sliced - output).abs().max() <= 1e-4 * output.abs().max())
