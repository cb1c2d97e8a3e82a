"""Merge adapters into their base model: those of a folder for an export, or those of a live model.

An export merges in fp32, one layer at a time, and rounds each tensor once to its dtype. The base is checked against
the adapter without weights, then loaded on the CPU as in training; experts that were quantized are rounded layer by
layer as they are read, so that no second copy of them exists. PEFT loads, merges and unloads. This module adds
what ``merge_and_unload`` does not do: the sum is not computed in the base model's 16 bits, fully trained tensors keep
their values from the file, and a tied embedding is untied if the embedding or the head was trained.

The adapters of a live model are merged by PEFT, in the dtype of the base model.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from alignment.config.errors import ModelError, OptionError, first_line
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.internals.transformers import loading
from alignment.internals.transformers_experts import packing_while_loading
from alignment.models.adapters.folder import AdapterFolder
from alignment.models.adapters.record import PREFIX, kind_of, unsupported, with_initialization
from alignment.models.experts import pack, quantizable, rounded
from alignment.models.loading import load_whole
from alignment.models.quantization import Quantization, is_packed, prepare_quantized
from alignment.models.source import read_config
from alignment.models.tasks import CAUSAL_LM
from alignment.run.activity import ACTIVITY

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What PEFT raises for adapters that do not fit a model.
_FAILURES = (ValueError, TypeError, KeyError, RuntimeError, AttributeError, NotImplementedError, ImportError)


def base_config(adapter: AdapterFolder, trust_remote_code: bool) -> PretrainedConfig:
    """Read the configuration of the adapter's base model, and check that a local folder's weights are complete.

    Raises:
        ModelError: the model does not exist, is truncated, does not fit the adapter's task, or is quantized by a
            method that cannot be reverted.
    """
    arguments = {"revision": adapter.revision} if adapter.revision else {}
    config = read_config(adapter.base, key="base", trust_remote_code=trust_remote_code, init_kwargs=arguments)
    method = _quantized_by(config)
    if method not in (None, "bitsandbytes"):
        raise ModelError(
            f"base: {adapter.base!r} is quantized with {method}, but adapters can only be merged into unquantized or "
            "bitsandbytes weights; pass the unquantized model with --base"
        )
    return config


def check_match(adapter: AdapterFolder, config: PretrainedConfig, trust_remote_code: bool) -> None:
    """Load the adapter into the base model on the meta device, before any weights of the base are read.

    If the adapter contains embeddings, their vocabulary size is written to ``config``.

    Raises:
        ModelError: the adapter does not fit the base model.
    """
    model = _without_weights(adapter, config, trust_remote_code)
    ends = {f"{name}.weight" for name, module in model.named_modules() if module in _ends(model)}
    rows = [shape[0] for key, shape in adapter.shapes.items() if key.replace(".base_layer.", ".") in ends]
    if rows and rows[0] != config.get_text_config().vocab_size:
        config.get_text_config().vocab_size = rows[0]
        model = _without_weights(adapter, config, trust_remote_code)
    _load(adapter, model, initialize=False)


def load_base(
    adapter: AdapterFolder, config: PretrainedConfig, target: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, set[str]]:
    """Load the base model on the CPU in its checkpoint's dtype, with ``config`` as :func:`check_match` has left it.

    Quantized weights are dequantized, to at least the ``target`` dtype of the export. Also returns the names of the
    parameters that transformers keeps in fp32.

    Raises:
        ModelError: the model cannot be loaded, or weights are missing.
    """
    stored = _quantized_by(config) is not None
    quantization = None if stored else adapter.quantization
    dtype = "auto" if quantization is None else trained_dtype(adapter) or torch.bfloat16
    source = adapter.base, adapter.revision, config, quantization
    # Quantize on the CPU even if a GPU is available: it may round differently, and the export would depend on it.
    model = load_extended(*source, dtype, trust_remote_code, torch.device("cpu"), adapter, rounded)
    narrow = model.config.dtype in (torch.bfloat16, torch.float16)
    kept = {name for name, one in model.named_parameters() if narrow and one.dtype == torch.float32}
    if stored or quantization is not None:
        packed = [f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ in
                  ("Linear4bit", "Linear8bitLt")]  # fmt: skip
        kept -= {*packed}  # even if their storage dtype is fp32
        # Do not run 4-bit layers before this: on CPUs with AVX512-BF16, a forward pass may repack their weights.
        model = model.dequantize(dtype=torch.promote_types(model.config.dtype, target))
    return model, kept


def load_extended(
    path: str, revision: str | None, config: PretrainedConfig, quantization: Mapping[str, Any] | None,
    dtype: torch.dtype | str, trust_remote_code: bool, device: torch.device, adapter: AdapterFolder | None,
    quantize: Callable[[Tensor, BitsAndBytesConfig], nn.Parameter] = pack,
) -> PreTrainedModel:  # fmt: skip
    """Load a model for an adapter, if any, with as many embeddings as ``config``; see :func:`check_match`.

    Its checkpoint may lack tensors that the adapter contains. Experts that were quantized in training are quantized
    with ``quantize``.

    Raises:
        ModelError: the model cannot be loaded, or other weights are missing.
    """
    arguments: dict[str, Any] = {"device_map": {"": device}, "revision": revision or "main"}
    content = dict(quantization or {})
    packs = content.pop("experts", False)
    if content:
        arguments["quantization_config"] = BitsAndBytesConfig.from_dict(content)
    task, shapes = (CAUSAL_LM, {}) if adapter is None else (adapter.task, adapter.shapes)
    own = [key.replace(".base_layer.", ".") for key in shapes]
    with packing_while_loading(quantizable, quantize) if packs else contextlib.nullcontext():
        model = load_whole(path, task, dtype, trust_remote_code, own, **arguments)
    if isinstance(found := getattr(model.config, "quantization_config", None), BitsAndBytesConfig):
        prepare_quantized(model, Quantization(found))
    rows = config.get_text_config().vocab_size
    if model.config.get_text_config().vocab_size != rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return model


def trained_dtype(adapter: AdapterFolder) -> torch.dtype | None:
    """Return the dtype in which the adapter was trained, or None if it was not recorded."""
    quantization = adapter.quantization or {}
    computed = quantization.get("bnb_4bit_compute_dtype") if quantization.get("load_in_4bit") else None
    return _NAMES.get(str(adapter.dtype or computed).removeprefix("torch."))


def inject(model: PreTrainedModel, adapter: AdapterFolder, dtype: torch.dtype = torch.float32) -> PeftModel:
    """Inject the adapter into ``model``, in place, with its own tensors in ``dtype``, and activate it.

    The embedding and the head of a tied model are separated, because an adapter may change only one of them.

    Raises:
        ModelError: PEFT cannot load the adapter.
    """
    ends = _ends(model)
    if len(ends) == 2 and ends[0].weight is ends[1].weight:
        ends[1].weight = nn.Parameter(ends[0].weight.detach().clone(), requires_grad=False)
    return _load(adapter, model, initialize=True, dtype=dtype).eval().requires_grad_(False)


def merge(injected: PeftModel, dtype: torch.dtype, kept: set[str]) -> PreTrainedModel:
    """Merge every adapted layer in place, and return the model in the dtype of the export, without adapters.

    Peak memory is the model plus a few fp32 copies of its largest tensor. If the embedding and the head of a tied
    model are still equal, they are tied again; otherwise the configuration is changed to untied.

    Args:
        injected: the result of :func:`inject`.
        dtype: dtype of the export.
        kept: names of the parameters that stay in fp32.

    Raises:
        ModelError: PEFT cannot merge this adapter.
    """
    text = injected.get_base_model().config.get_text_config()
    was_tied = text.tie_word_embeddings  # merge_and_unload may change it
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for name, layer in list(injected.get_base_model().named_modules()):
            if not isinstance(layer, BaseTunerLayer):
                continue
            ACTIVITY.progress()
            only = getattr(layer, "parameter_name", None)  # if the adapter is on a single parameter
            base: Any = layer.get_base_layer()
            for inner, parameter in base.named_parameters():
                if only in (None, inner):
                    parameter.data = parameter.data.float()
            try:
                layer.merge()
            except _FAILURES as error:
                raise ModelError(f"the adapter of {name} cannot be merged: {first_line(error)}") from error
            for inner, parameter in base.named_parameters():
                if only in (None, inner) and f"{name}.{inner}".replace(".base_layer", "") not in kept:
                    parameter.data = parameter.data.to(dtype)
        model: PreTrainedModel = injected.merge_and_unload()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if name in kept else dtype)
    ends = _ends(model)
    if was_tied and len(ends) == 2:
        tied = torch.equal(ends[0].weight, ends[1].weight)
        if tied:
            ends[1].weight = ends[0].weight
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = tied
    return model


def _quantized_by(config: PretrainedConfig) -> str | None:
    """Return transformers' name of a checkpoint's quantization method, or None if it is not quantized."""
    given: Any = getattr(config, "quantization_config", None)
    if given is None:
        return None
    method = (given if isinstance(given, dict) else vars(given)).get("quant_method")
    return str(getattr(method, "value", method) or "bitsandbytes")


def _ends(model: PreTrainedModel) -> list[Any]:
    """Return the input embedding and the head."""
    return [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]


def _without_weights(adapter: AdapterFolder, config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Create the base model on the meta device."""
    config = copy.deepcopy(config)
    for name, value in adapter.task.arguments.items():
        setattr(config, name, value)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"), loading(None):
            model: PreTrainedModel = adapter.task.auto.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, ImportError, OSError) as error:
        raise ModelError(f"base: {adapter.base!r} cannot be built: {first_line(error)}") from error
    return model


def _load(
    adapter: AdapterFolder, model: PreTrainedModel, initialize: bool, dtype: torch.dtype = torch.float32
) -> PeftModel:
    """Inject the adapter and load its tensors with PEFT, in fp32 without rounding them.

    Initial weights, which PiSSA computes from the base's, are not computed (``initialize``) on the meta device.
    """
    config = copy.deepcopy(adapter.config) if initialize else with_initialization(adapter.config, False)
    config.inference_mode = True
    base = {id(parameter) for parameter in model.parameters()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            injected = PeftModel(model, config, low_cpu_mem_usage=not initialize)
            for name, parameter in injected.named_parameters():
                replaced = name.removeprefix(PREFIX) in adapter.shapes or id(parameter) not in base
                if replaced and parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
            found = injected.load_adapter(
                str(adapter.path), "default", torch_device="cpu", low_cpu_mem_usage=not initialize,
                autocast_adapter_dtype=False,
            )  # fmt: skip
            for what, keys in (("no", found.missing_keys), ("the unexpected", found.unexpected_keys)):
                if keys:
                    name = keys[0].removeprefix(PREFIX).replace(".default", "")
                    raise ValueError(f"the adapter has {what} tensor {name}")
    except _FAILURES as error:
        raise ModelError(
            f"{adapter.path} does not fit its base model {adapter.base!r}: {first_line(error)}; pass the right model "
            "with --base"
        ) from error
    return injected


def merge_live(live: PeftModel) -> tuple[PreTrainedModel, str]:
    """Merge the active adapter of ``live`` into its base, in place, to train new adapters on the merged model.

    TRL below 1.0 does so if it gets both a ``PeftModel`` and a ``peft_config``.

    Returns:
        The model without adapters, and a message for the user.

    Raises:
        OptionError: merging would round quantized weights, or is not supported for these adapters.
    """
    active = list(live.active_adapters)
    name, config = active[0], live.peft_config[active[0]]
    reason = unsupported(config)
    if len(active) > 1:
        reason = f"several are active ({', '.join(active)})"
    elif any(map(is_packed, live.parameters())):
        reason = "the base weights are quantized, and merging would round them"
    elif any(map(is_partitioned, live.parameters())):
        reason = "an earlier run has partitioned the weights (ZeRO-3)"
    try:
        if reason is not None:
            raise ValueError(reason)
        model: PreTrainedModel = live.merge_and_unload(safe_merge=True)
    except (ValueError, TypeError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise OptionError(
            f"peft_config: the adapters of model cannot be merged: {first_line(error)}; merge them yourself and pass "
            "the merged model, or remove peft_config to continue training them"
        ) from error
    return model, (
        f"model: its {kind_of(config)} adapter {name!r} was merged into the base model in "
        f"{str(model.dtype).removeprefix('torch.')}; others are dropped. The adapters of peft_config are trained on "
        "the merged model and only work with it: save it as well (merge_and_unload() and save_pretrained() before "
        "training)"
    )
