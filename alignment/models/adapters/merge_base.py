"""The base model of a merge: check it against the adapter without weights, then load it on the CPU as in training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from alignment.config.errors import ModelError, first_line
from alignment.internals.transformers import loading
from alignment.models.adapters.folder import AdapterFolder
from alignment.models.loading import load_whole
from alignment.models.source import read_config

Shape = tuple[int, ...]
_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    if (method or adapter.quantization) and find_spec("bitsandbytes") is None:
        raise ModelError(
            "base: its weights are quantized with bitsandbytes, which is not installed; run pip install bitsandbytes"
        )
    return config


def check_match(adapter: AdapterFolder, config: PretrainedConfig, trust_remote_code: bool) -> set[str]:
    """Compare names and shapes of the adapter's tensors with the base model's, before any weights are read.

    If the adapter contains embeddings, their vocabulary size is written to ``config``.

    Returns:
        The tensors of the base model that the adapter replaces, by their names in the base model.

    Raises:
        ModelError: a tensor does not match; the message names the first one.
    """
    model = _without_weights(adapter, config, trust_remote_code)
    embeddings = {f"{name}.weight" for name, module in model.named_modules() if module in _embeddings(model)}
    for name in sorted(embeddings & {plain(key) for key in adapter.shapes}):
        rows = next(shape[0] for key, shape in adapter.shapes.items() if plain(key) == name)
        if rows != config.get_text_config().vocab_size:
            config.get_text_config().vocab_size = rows
            model = _without_weights(adapter, config, trust_remote_code)
            break
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    replaced = {key: plain(key) for key in adapter.shapes if plain(key) in own}
    expected = _adapter_shapes(adapter, model) | {key: own[name] for key, name in replaced.items()}
    for key, shape in adapter.shapes.items():
        if shape != expected.get(key, shape):
            raise _mismatch(adapter, f"{key} has shape {list(shape)}; expected {list(expected[key])}")
    missing, unknown = expected.keys() - adapter.shapes.keys(), adapter.shapes.keys() - expected.keys()
    if (missing or unknown) and not _is_converted(adapter, config, trust_remote_code):
        one = min(missing or unknown)
        raise _mismatch(adapter, f"the adapter has {'no' if missing else 'the unexpected'} tensor {one}")
    return set(replaced.values())


def load_base(
    adapter: AdapterFolder, config: PretrainedConfig, target: torch.dtype, replaced: set[str], trust_remote_code: bool
) -> tuple[PreTrainedModel, set[str]]:
    """Load the base model on the CPU in its checkpoint's dtype; quantized weights are dequantized.

    Args:
        adapter: the adapter to be merged.
        config: the configuration after :func:`check_match`.
        target: dtype of the export; dequantized weights are at least as wide.
        replaced: the tensors that the adapter provides, which may be missing from the checkpoint.
        trust_remote_code: run code that comes with the model.

    Returns:
        The model in evaluation mode, and the names of the parameters that transformers keeps in fp32.

    Raises:
        ModelError: the model cannot be loaded, or weights are missing.
    """
    arguments: dict[str, Any] = {"revision": adapter.revision} if adapter.revision else {}
    dtype: torch.dtype | str = "auto"
    quantized = adapter.quantization is not None or _quantized_by(config) is not None
    if quantized:
        # Quantize on the CPU even if a GPU is available: it may round differently, and the export would depend on it.
        arguments["device_map"] = {"": "cpu"}
    if adapter.quantization is not None and _quantized_by(config) is None:
        arguments["quantization_config"] = BitsAndBytesConfig.from_dict(dict(adapter.quantization))
        dtype = trained_dtype(adapter) or torch.bfloat16
    model = load_whole(adapter.base, adapter.task, dtype, trust_remote_code, replaced, **arguments)
    narrow = model.config.dtype in (torch.bfloat16, torch.float16)
    kept = {name for name, one in model.named_parameters() if narrow and one.dtype == torch.float32}
    if quantized:
        kept = {name for name in kept if not _is_quantized(model, name)}
        # Do not run 4-bit layers before this: on CPUs with AVX512-BF16, a forward pass may repack their weights.
        model = model.dequantize(dtype=torch.promote_types(model.config.dtype, target))
    rows = config.get_text_config().vocab_size
    if model.config.get_text_config().vocab_size != rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return model, kept


def trained_dtype(adapter: AdapterFolder) -> torch.dtype | None:
    """Return the dtype in which the adapter was trained, or None if it was not recorded."""
    quantization = adapter.quantization or {}
    computed = quantization.get("bnb_4bit_compute_dtype") if quantization.get("load_in_4bit") else None
    return _NAMES.get(str(adapter.dtype or computed).removeprefix("torch."))


def plain(key: str) -> str:
    """Return the base model's name of one of the adapter's tensors, which may be the tensor of an adapted layer."""
    return key.replace(".base_layer.", ".")


def without_saved_modules(config: PeftConfig) -> PeftConfig:
    """Return a copy of a configuration for the adapted layers only; fully saved modules go into the base model."""
    twin = copy.deepcopy(config)
    twin.task_type = None  # with it, PEFT would add a classifier's head
    twin.inference_mode = True
    if getattr(twin, "modules_to_save", None):
        twin.modules_to_save = None
    return twin


def _quantized_by(config: PretrainedConfig) -> str | None:
    """Return transformers' name of a checkpoint's quantization method, or None if it is not quantized."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else given.quant_method
    return str(getattr(method, "value", method) or "bitsandbytes")


def _is_quantized(model: nn.Module, name: str) -> bool:
    """Return whether a parameter is a packed weight, even if its storage dtype is fp32."""
    module = model.get_submodule(name.rpartition(".")[0])
    return name.endswith(".weight") and type(module).__name__ in ("Linear4bit", "Linear8bitLt")


def _task_arguments(adapter: AdapterFolder) -> dict[str, Any]:
    return dict(adapter.task.arguments)


def _embeddings(model: PreTrainedModel) -> list[nn.Module]:
    return [one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None]


def _without_weights(adapter: AdapterFolder, config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Create the base model on the meta device."""
    config = copy.deepcopy(config)
    for name, value in _task_arguments(adapter).items():
        setattr(config, name, value)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with torch.device("meta"), loading(None):
            model: PreTrainedModel = adapter.task.auto.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, ImportError, OSError) as error:
        raise ModelError(f"base: {adapter.base!r} cannot be built: {first_line(error)}") from error
    return model


def _injected(adapter: AdapterFolder, model: PreTrainedModel) -> PeftModel:
    """Inject the adapter's layers into a model on the meta device."""
    config = without_saved_modules(adapter.config)
    for name in ("init_lora_weights", "init_weights"):
        if hasattr(config, name):
            setattr(config, name, False)  # PiSSA and similar methods compute them from the base weights
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return PeftModel(model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    except (ValueError, TypeError, RuntimeError, AttributeError, NotImplementedError, ImportError) as error:
        raise _mismatch(adapter, first_line(error)) from error


def _adapter_shapes(adapter: AdapterFolder, model: PreTrainedModel) -> dict[str, Shape]:
    """Return the expected shapes of the adapter's tensors for this base model, by name without PEFT's prefix."""
    state = get_peft_model_state_dict(_injected(adapter, model), save_embedding_layers=False)
    return {name.removeprefix("base_model.model."): tuple(tensor.shape) for name, tensor in state.items()}


def _is_converted(adapter: AdapterFolder, config: PretrainedConfig, trust_remote_code: bool) -> bool:
    """Return whether PEFT can convert the names of an adapter that was saved with an older transformers release."""
    injected = _injected(adapter, _without_weights(adapter, config, trust_remote_code))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = injected.load_adapter(
                str(adapter.path), "default", torch_device="cpu", low_cpu_mem_usage=True, autocast_adapter_dtype=False
            )
    except (ValueError, KeyError, RuntimeError, NotImplementedError):
        return False
    return not found.missing_keys and not found.unexpected_keys


def _mismatch(adapter: AdapterFolder, what: str) -> ModelError:
    return ModelError(
        f"{adapter.path} does not fit its base model {adapter.base!r}: {what}; pass the right model with --base"
    )


def tuner_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and module of every adapted layer, outer layers before the layers inside them."""
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module
