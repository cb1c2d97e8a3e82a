"""Merge an adapter into its base model in fp32, one tensor at a time, rounding each once to the dtype of the export.

PEFT does the arithmetic, layer by layer. This module adds what ``merge_and_unload`` does not do: the sum is not
computed in the base model's 16 bits, saved modules are taken exactly from the file, and a tied embedding is untied if
the embedding or the head was trained.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.config.errors import ModelError, first_line
from alignment.models.adapters.folder import AdapterFolder
from alignment.models.adapters.merge_base import plain, tuner_layers, without_saved_modules
from alignment.run.activity import ACTIVITY


@dataclass(frozen=True)
class Rounding:
    """The dtype of each tensor of the export.

    Attributes:
        target: dtype of the export.
        kept: names of the parameters that transformers always keeps in fp32.
    """

    target: torch.dtype
    kept: set[str]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the export."""
        return torch.float32 if name in self.kept else self.target


def put_saved_tensors(model: PreTrainedModel, adapter: AdapterFolder, replaced: set[str]) -> None:
    """Replace the base model's tensors with those that the adapter contains in full: modules, biases, embeddings.

    They stay in fp32 until :func:`finish`, because adapters may be merged into them.
    """
    if not replaced:
        return
    one_of_both = _untie(model, replaced) and getattr(adapter.config, "ensure_weight_tying", False)
    with safe_open(adapter.weights, framework="pt") as opened:
        for key in opened.keys():
            name = plain(key.removeprefix("base_model.model."))
            if name in replaced:
                _replace(model, name, opened.get_tensor(key).float())
    if one_of_both:
        ends = _ends(model)
        if sum(name in replaced for name in ends) == 1:
            source, other = sorted(ends, key=lambda name: name not in replaced)
            _replace(model, other, model.get_parameter(source).data.clone())


def inject(model: PreTrainedModel, adapter: AdapterFolder) -> PeftModel:
    """Inject the adapter with fp32 weights into ``model``, in place, and activate it.

    Raises:
        ModelError: PEFT cannot load the adapter.
    """
    own = {id(parameter) for parameter in model.parameters()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            injected = PeftModel.from_pretrained(
                model, str(adapter.path), config=without_saved_modules(adapter.config), torch_device="cpu"
            )
    except (ValueError, TypeError, KeyError, RuntimeError, NotImplementedError) as error:
        raise ModelError(
            f"{adapter.path} cannot be loaded into its base model {adapter.base!r}: {first_line(error)}"
        ) from error
    for parameter in injected.parameters():
        if id(parameter) not in own and parameter.is_floating_point():
            parameter.data = parameter.data.float()
    _untie_adapted(model)
    return injected.eval().requires_grad_(False)


def merge(injected: PeftModel, rounding: Rounding) -> None:
    """Merge every adapted layer in place. Peak memory is the model plus a few fp32 copies of its largest tensor.

    Args:
        injected: the result of :func:`inject`.
        rounding: the dtypes of the merged tensors.

    Raises:
        ModelError: PEFT cannot merge this adapter.
    """
    for name, layer in list(tuner_layers(injected.get_base_model())):
        ACTIVITY.progress()
        base = layer.get_base_layer()
        only = getattr(layer, "parameter_name", None)  # if the adapter is on a single parameter
        before: dict[str, Tensor] = {}
        for inner, parameter in base.named_parameters():
            if only in (None, inner):
                before[inner] = parameter.data
                parameter.data = parameter.data.to(torch.float32, copy=True)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                layer.merge()
        except (ValueError, RuntimeError, NotImplementedError, AttributeError) as error:
            raise ModelError(f"the adapter of {name} cannot be merged: {first_line(error)}") from error
        for inner, old in before.items():
            parameter = base.get_parameter(inner)
            if torch.equal(parameter.data, old.float()):
                parameter.data = old
            else:
                outer = plain(f"{name}.").removesuffix(".").replace(".base_layer", "")
                parameter.data = parameter.data.to(rounding.dtype(f"{outer}.{inner}"))


def finish(injected: PeftModel, rounding: Rounding) -> PreTrainedModel:
    """Return the model without adapters, in the dtype of the export. Call this after :func:`merge`.

    If a tied embedding was untied but still equals the head, they are tied again; otherwise the configuration is
    changed to untied.
    """
    was_tied = injected.get_base_model().config.get_text_config().tie_word_embeddings  # merge_and_unload may change it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: PreTrainedModel = injected.merge_and_unload()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(rounding.dtype(name))
    _tie_or_tell(model, was_tied)
    return model


def _replace(model: nn.Module, name: str, new: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    getattr(model.get_submodule(owner), last).data = new


def _ends(model: PreTrainedModel) -> list[str]:
    """Return the names of the weights of the input embedding and of the head."""
    modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = {id(module): name for name, module in model.named_modules()}
    return [f"{names[id(module)]}.weight" for module in modules if module is not None and id(module) in names]


def _untie(model: PreTrainedModel, trained: set[str]) -> bool:
    """Give the head its own copy of tied weights if ``trained`` contains the embedding or the head."""
    ends = _ends(model)
    if len(ends) < 2 or not trained.intersection(ends):
        return False
    return _separate(model.get_input_embeddings(), model.get_output_embeddings())


def _untie_adapted(model: PreTrainedModel) -> None:
    """Untie the embedding and the head if either has an adapter, because merging it would change both."""
    layers = {id(layer) for _, layer in tuner_layers(model)}
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    if any(id(end) in layers for end in ends):
        _separate(*(end.get_base_layer() if id(end) in layers else end for end in ends))


def _separate(embedding: Any, head: Any) -> bool:
    if embedding is None or head is None or embedding.weight is not head.weight:
        return False
    head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
    return True


def _tie_or_tell(model: PreTrainedModel, was_tied: bool) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not was_tied or embedding is None or head is None:
        return
    if embedding.weight is not head.weight and torch.equal(embedding.weight, head.weight):
        head.weight = embedding.weight
    tied = embedding.weight is head.weight
    model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = tied
