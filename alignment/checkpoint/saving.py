"""Writing a model as a Hugging Face folder, atomically and from any ZeRO stage."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from alignment.config.errors import OutputError
from alignment.engines.collectives import copied_from_first_rank
from alignment.internals.deepspeed_zero3 import is_partitioned, whole_bytes
from alignment.internals.transformers import tokenizer_options
from alignment.models.adapters.record import TRAINING_BASE, Adapters, adapter_tensors, adapter_weights
from alignment.models.classifier import HEAD_TENSORS
from alignment.models.source import ModelSource

_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "adapter_model*")
_BESIDE_WEIGHTS = ("config.json", "generation_config.json", "adapter_config.json", TRAINING_BASE)
_OF_MODELS = ("dtype", "torch_dtype", "quantization_config", "device_map")  # keywords of from_pretrained


def gathered_state_dict(model: PreTrainedModel, keep: bool, only: Collection[str] | None = None) -> dict[str, Tensor]:
    """All parameters and persistent buffers, unsharded, on the CPU. Collective; gathers one parameter at a time.

    Args:
        model: the model inside an engine, or a plain one.
        keep: whether this rank needs the result; the others get an empty dict.
        only: names to include; None: all.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if only is not None and name not in only:
            continue
        context = deepspeed.zero.GatheredParameters(parameter, enabled=is_partitioned(parameter))
        with context:
            if keep:
                state[name] = parameter.detach().to("cpu", copy=True).contiguous()
    if keep:
        wanted = model.state_dict().keys() if only is None else only
        state |= {name: b.detach().cpu().clone() for name, b in model.named_buffers() if name in wanted}
    return state


def write_model(model: PreTrainedModel, tokenizer: Any, folder: Path, *, first_rank: bool) -> None:
    """Write model and tokenizer into ``folder`` with ``save_pretrained``. Collective.

    Raises:
        OutputError: the folder cannot be written, or the disk is full.
    """
    state = gathered_state_dict(model, keep=first_rank)
    if first_rank:
        with written_folder(folder, tokenizer) as partial:
            model.save_pretrained(partial, state_dict=state)


def write_adapters(
    model: PreTrainedModel, adapters: Adapters, source: ModelSource, tokenizer: Any, folder: Path, *, first_rank: bool
) -> None:
    """Write adapters, and fully trained modules, in PEFT's format. Collective.

    Args:
        model: the model inside an engine.
        adapters: the adapters to write.
        source: the model that they were trained on; a record of it is written to the same folder.
        tokenizer: written to the same folder.
        folder: as for :func:`write_model`.
        first_rank: whether this rank writes.

    Raises:
        OutputError: the folder cannot be written, or the disk is full.
    """
    names = _adapter_names(model, adapters)
    state = gathered_state_dict(model, keep=first_rank, only=set(names.values()))
    if not first_rank:
        return
    from alignment.models.adapters.folder import write_training_base  # imports peft

    config = copy.deepcopy(adapters.config)
    config.inference_mode = True
    quantized = None if source.quantization is None else source.quantization.config.to_dict()

    with written_folder(folder, tokenizer) as partial:
        tensors = {f"base_model.model.{saved}": state[name] for saved, name in names.items()}
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(partial))
        write_training_base(
            partial,
            base_model=source.name,
            revision=source.init_kwargs.get("revision"),
            quantization=quantized,
            task=source.task,
            merged=source.merged,
            dtype=str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        )


def load_adapters(model: PreTrainedModel, adapters: Adapters, folder: Path, *, first_rank: bool) -> None:
    """Load adapters written by :func:`write_adapters` into an engine's model; see :func:`load_weights`."""
    state = adapter_weights(str(folder)) if first_rank else {}
    parameters = dict(model.named_parameters())
    for saved, name in _adapter_names(model, adapters).items():
        if name in parameters:
            _fill(parameters[name], state.get(f"base_model.model.{saved}"))


def _adapter_names(model: PreTrainedModel, adapters: Adapters) -> dict[str, str]:
    """Map the saved names of an adapter's tensors to those of the model."""
    own = [*(name for name, _ in model.named_parameters()), *(name for name, _ in model.named_buffers())]
    names: dict[str, str] = adapter_tensors(
        model, adapters.name, {name: name for name in own}, embeddings=adapters.embeddings
    )
    if adapters.head:
        names |= {name: name for name in HEAD_TENSORS if name in own}
    return names


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer without keywords of the model that it was loaded with, as in TRL's scripts.

    It keeps them, and they are not JSON-serializable.
    """
    given = tokenizer_options(tokenizer)
    for name in _OF_MODELS:
        given.pop(name, None)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def written_folder(folder: Path, tokenizer: Any, key: str = "output_dir") -> Iterator[Path]:
    """A hidden folder whose files, and those of the tokenizer, are moved into ``folder`` at the end of the context.

    If ``folder`` exists, the hidden folder is inside it because ``folder`` may be a mount point, and a move is a
    rename only within it.

    Args:
        folder: the destination.
        tokenizer: None to write none.
        key: name of the destination in messages.

    Raises:
        OutputError: the folder cannot be written, or the disk is full.
    """
    partial = folder / ".partial" if folder.exists() else folder.parent / f".{folder.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with no_progress_bar():
            yield partial
        if tokenizer is not None:
            _save_tokenizer(tokenizer, partial)
        share_with_others(partial)
        move_into(partial, folder)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{key}: could not write the model to {folder}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def exported_tensors(folder: Path, names: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The parameters that a folder's model files contain in unmodified fp32: their file and key by name.

    Args:
        folder: a folder written by :func:`write_model` or :func:`write_adapters`.
        names: the key of each parameter by its name; a model may be saved under other keys than its own.
    """
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            keys = set(opened.keys())
            for name, key in names.items():
                if key in keys and opened.get_slice(key).get_dtype() == "F32":
                    found[name] = (file.name, key)
    return found


def trained_keys(model: PreTrainedModel, adapters: Adapters | None) -> dict[str, str]:
    """The keys under which trainable parameters are saved, by name, as long as no conversion renames them."""
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if adapters is None:
        return {name: name for name in trainable}
    keys = {name: f"base_model.model.{saved}" for saved, name in _adapter_names(model, adapters).items()}
    return {name: keys[name] for name in trainable if name in keys}


def written_bytes(model: PreTrainedModel, adapters: Adapters | None) -> int:
    """The total size of the tensors that :func:`write_model` or :func:`write_adapters` writes."""
    wanted = model.state_dict().keys() if adapters is None else set(_adapter_names(model, adapters).values())
    seen: set[int] = set()
    total = 0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in wanted and id(tensor) not in seen:
            seen.add(id(tensor))
            total += whole_bytes(tensor) if is_partitioned(tensor) else tensor.numel() * tensor.element_size()
    return total


def load_weights(model: PreTrainedModel, folder: Path, *, first_rank: bool) -> None:
    """Load weights written by :func:`write_model` into a model inside an engine. Collective.

    The first rank reads the entire model into host memory; under ZeRO-3, one parameter at a time is gathered and
    partitioned again. The optimizer's copy of the weights is not updated, so use this only at the end of a run.
    """
    state: dict[str, Tensor] = {}
    if first_rank:
        with no_progress_bar():
            state = type(model).from_pretrained(folder, dtype=model.dtype).state_dict()
    for name, parameter in model.named_parameters():
        _fill(parameter, state.get(name))


def _fill(parameter: nn.Parameter, value: Tensor | None) -> None:
    """Set a parameter on every rank to the first rank's value. Collective."""
    partitioned = is_partitioned(parameter)
    with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=partitioned):
        if value is not None:
            parameter.data.copy_(value)
    if not partitioned:
        copied_from_first_rank(parameter.data)


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bar for the shards, which would break the run's own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def share_with_others(folder: Path) -> None:
    """Give weight files the mode of the other files: safetensors makes them readable by their owner only."""
    mode = next(folder.glob("*.json")).stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def move_into(source: Path, target: Path) -> None:
    """Move the files of ``source`` into ``target``, replacing those of the same name, and remove ``source``.

    If the target does not exist, this is a single rename. Weights that the new files do not replace are removed, so
    that no index points into an older model and no adapters are left next to another model.
    """
    if not target.exists():
        os.replace(source, target)
        return
    names = {file.name for file in source.iterdir()}
    for name in names:
        if (target / name).is_dir():
            shutil.rmtree(target / name)  # a rename can replace a file, but not a folder with files
        os.replace(source / name, target / name)
    outdated = [old for pattern in _WEIGHTS for old in target.glob(pattern) if old.name not in names]
    if outdated:  # a configuration that is not replaced belongs to the previous model
        outdated += [target / name for name in _BESIDE_WEIGHTS if name not in names]
    for old in outdated:
        old.unlink(missing_ok=True)
    source.rmdir()
