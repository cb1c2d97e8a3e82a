"""Writing a model as a Hugging Face folder, from any ZeRO stage, so that no reader ever sees half of it."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from alignment.config.errors import OutputError
from alignment.internals.deepspeed_zero3 import is_partitioned


def gathered_state_dict(model: PreTrainedModel, keep: bool) -> dict[str, Tensor]:
    """Every parameter and persistent buffer, whole, on the CPU. All ranks must call it; one at a time is gathered.

    Args:
        model: the model inside an engine, or a plain one.
        keep: whether this rank wants the result; the others get an empty dict.
    """
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        context = deepspeed.zero.GatheredParameters(parameter, enabled=is_partitioned(parameter))
        with context:
            if keep:
                state[name] = parameter.detach().to("cpu", copy=True).contiguous()
    if keep:
        persistent = model.state_dict().keys()
        state |= {name: b.detach().cpu().clone() for name, b in model.named_buffers() if name in persistent}
    return state


def write_model(model: PreTrainedModel, tokenizer: Any, folder: Path, *, first_rank: bool) -> None:
    """``save_pretrained`` model and tokenizer into ``folder``; collective.

    The files are written to a hidden folder first and moved into place when all of them are there. Where ``folder``
    exists the hidden one is inside it, because ``folder`` may be a mount point: only there is a move a rename.

    Raises:
        OutputError: the folder cannot be written, a full disk included.
    """
    state = gathered_state_dict(model, keep=first_rank)
    if not first_rank:
        return
    partial = folder / ".partial" if folder.exists() else folder.parent / f".{folder.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        with _no_progress_bar():
            model.save_pretrained(partial, state_dict=state)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        _share_with_others(partial)
        move_into(partial, folder)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"output_dir: could not write the model to {folder}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_weights(model: PreTrainedModel, folder: Path, *, first_rank: bool) -> None:
    """Replace the weights of a model inside an engine by those that :func:`write_model` saved; collective.

    The first rank reads the whole model into host memory; under ZeRO-3 one parameter at a time is gathered and
    divided again. The optimizer's copy of the weights is left as it is, so this is for the end of a run.
    """
    state: dict[str, Tensor] = {}
    if first_rank:
        with _no_progress_bar():
            state = type(model).from_pretrained(folder, dtype=model.dtype).state_dict()
    for name, parameter in model.named_parameters():
        partitioned = is_partitioned(parameter)
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=partitioned):
            if first_rank:
                parameter.data.copy_(state[name])
        if not partitioned:
            torch.distributed.broadcast(parameter.data, src=0)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers' bar for the shards would break the run's own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _share_with_others(folder: Path) -> None:
    """Give weights the mode of the files beside them: safetensors makes its own readable by their owner only."""
    mode = (folder / "config.json").stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def move_into(source: Path, target: Path) -> None:
    """Move the files of ``source`` into ``target``, replacing those of the same name; ``source`` disappears.

    Where the target does not exist this is one rename. Weights that the new files do not replace are removed, so that
    an index never points into an older model.
    """
    if not target.exists():
        os.replace(source, target)
        return
    names = {file.name for file in source.iterdir()}
    for name in names:
        if (target / name).is_dir():
            shutil.rmtree(target / name)  # a rename replaces a file, but no folder that has files
        os.replace(source / name, target / name)
    for old in [*target.glob("model*.safetensors"), *target.glob("model.safetensors.index.json")]:
        if old.name not in names:
            old.unlink()
    source.rmdir()
