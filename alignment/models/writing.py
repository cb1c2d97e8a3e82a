"""Writing a model as a Hugging Face folder, atomically and from any ZeRO stage."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import deepspeed
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from alignment.config.errors import OutputError
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.internals.transformers import tokenizer_options
from alignment.models.adapters.record import PREFIX, TRAINING_BASE, Adapters, adapter_tensors
from alignment.models.classifier import HEAD_TENSORS
from alignment.models.source import ModelSource

_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "adapter_model*")
_BESIDE_WEIGHTS = ("config.json", "generation_config.json", "adapter_config.json", TRAINING_BASE)
_OF_MODELS = ("dtype", "torch_dtype", "quantization_config", "device_map")


def gathered_state_dict(model: PreTrainedModel, keep: bool, only: Collection[str] | None = None) -> dict[str, Tensor]:
    """All parameters and persistent buffers, or ``only`` those with these names, unsharded, on the CPU. Collective.

    One parameter at a time is gathered. The result is empty on a rank that does not ``keep`` it.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if only is not None and name not in only:
            continue
        with deepspeed.zero.GatheredParameters(parameter, enabled=is_partitioned(parameter)):
            if keep:
                state[name] = parameter.detach().to("cpu", copy=True).contiguous()
    if keep:
        wanted = model.state_dict().keys() if only is None else only
        state |= {name: b.detach().cpu().clone() for name, b in model.named_buffers() if name in wanted}
    return state


def write_model(
    model: PreTrainedModel, tokenizer: Any, folder: Path, *, first_rank: bool, key: str = "output_dir"
) -> None:
    """Write model and tokenizer, if any, with ``save_pretrained``. Collective. Raises OutputError if that fails."""
    state = gathered_state_dict(model, keep=first_rank)
    if first_rank:
        with written_folder(folder, tokenizer, key) as partial:
            model.save_pretrained(partial, state_dict=state)


def write_adapters(
    model: PreTrainedModel,
    adapters: Adapters,
    source: ModelSource,
    tokenizer: Any,
    folder: Path,
    *,
    first_rank: bool,
    key: str = "output_dir",
) -> None:
    """Write adapters, fully trained modules and a record of their base model in PEFT's format. Collective.

    Raises OutputError if the folder cannot be written.
    """
    names = adapter_names(model, adapters)
    state = gathered_state_dict(model, keep=first_rank, only=set(names.values()))
    if not first_rank:
        return
    from alignment.models.adapters.folder import write_training_base  # imports peft

    config = copy.deepcopy(adapters.config)
    config.inference_mode = True
    with written_folder(folder, tokenizer, key) as partial:
        tensors = {key: state[name] for key, name in names.items()}
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(partial))
        write_training_base(
            partial,
            base_model=source.name,
            revision=source.init_kwargs.get("revision"),
            quantization=None if source.quantization is None else source.quantization.content(),
            task=source.task,
            merged=source.merged,
            dtype=str(next(iter(tensors.values())).dtype).removeprefix("torch."),
        )


def adapter_names(model: PreTrainedModel, adapters: Adapters) -> dict[str, str]:
    """Map the keys of an adapter's tensors in saved files to the names of the model."""
    own = {name: name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    names: dict[str, str] = adapter_tensors(model, adapters.name, own, embeddings=adapters.embeddings)
    if adapters.head:
        names |= {name: name for name in HEAD_TENSORS if name in own}
    return {f"{PREFIX}{saved}": name for saved, name in names.items()}


@contextlib.contextmanager
def written_folder(folder: Path, tokenizer: Any, key: str = "output_dir") -> Iterator[Path]:
    """A hidden folder whose files, and those of the tokenizer if any, are moved into ``folder`` at the end.

    Raises OutputError if the folder, named as ``key``, cannot be written, or the disk is full.
    """
    # Inside an existing folder, which may be a mount point: a move is a rename only within it.
    partial = folder / ".partial" if folder.exists() else folder.parent / f".{folder.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with no_progress_bar():
            yield partial
        if tokenizer is not None:
            for name in _OF_MODELS:  # keywords of the model that TRL's scripts load it with, not JSON-serializable
                tokenizer_options(tokenizer).pop(name, None)
            try:
                tokenizer.save_pretrained(partial)
            except Exception as error:  # a fast tokenizer raises nothing more specific, even if the disk is full
                raise OSError(str(error)) from error
        mode = next(partial.glob("*.json")).stat().st_mode  # safetensors makes files readable by their owner only
        for file in partial.glob("*.safetensors"):
            file.chmod(mode)
        move_into(partial, folder)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"{key}: could not write the model to {folder}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bars, which would break the run's own or fill a log."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


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
    outdated = {old.name for pattern in _WEIGHTS for old in target.glob(pattern)} - names
    if outdated:  # a configuration that is not replaced belongs to the previous model
        outdated |= set(_BESIDE_WEIGHTS) - names
    for name in outdated:
        (target / name).unlink(missing_ok=True)
    source.rmdir()
