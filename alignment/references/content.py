"""Identify a reference model by the content of its weights, not by name or timestamp, for precomputed log-probs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from alignment.config.errors import SECRETS, ModelError
from alignment.data.sources import file_hash
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource

# Weights, their indices, configurations and code. Tokenizers are not needed, because rows are identified by tokens.
_FILES = ("config.json", "adapter_config.json", "*.safetensors", "*.bin", "*.index.json", "*.py")
_SETTLED_S = 2.0  # a file that changed more recently may change again with the same timestamp


def source_content(source: ModelSource, memory: Path, *, keep: bool) -> dict[str, Any]:
    """Identify a model's content: by hashes of its files, by the commit of a Hub model, or by a hash of a live model.

    Collective if the model is live and partitioned; parameters are gathered one at a time.

    Args:
        source: the model.
        memory: a JSON file that caches hashes of files by path, size and timestamp.
        keep: whether this rank needs the result; other ranks get an empty dict.
    """
    if source.live is not None:
        return live_content(source.live, keep)
    if not keep:
        return {}
    assert source.path is not None
    found: dict[str, Any] = {"arguments": _arguments(source)}
    folder = Path(source.path) / source.init_kwargs.get("subfolder", "")
    if folder.is_dir():
        files = sorted({file for pattern in _FILES for file in folder.glob(pattern)})
        return found | {"files": file_hashes(files, memory)}
    return found | {"name": source.path, "commit": _commit(source)}


def _arguments(source: ModelSource) -> dict[str, str]:
    """Return the arguments that a model is loaded with; a store records them, so not the token."""
    return {name: repr(value) for name, value in source.init_kwargs.items() if name not in SECRETS}


def adapters_content(adapters: Adapters, memory: Path) -> dict[str, Any]:
    """Identify the adapters of a reference. Live adapters are included in :func:`live_content`."""
    if adapters.path is None:
        return {"name": adapters.name}
    folder = Path(adapters.path)
    if folder.is_dir():
        files = sorted({file for pattern in _FILES for file in folder.glob(pattern)})
        return {"files": file_hashes(files, memory)}
    return {"name": adapters.path, "commit": _cached_commit(adapters.path, "adapter_config.json", {})}


def _commit(source: ModelSource) -> str:
    """Return the commit of a Hub model, whose configuration is in the cache because it was loaded before."""
    assert source.path is not None
    file = "/".join(part for part in (source.init_kwargs.get("subfolder", ""), "config.json") if part)
    return _cached_commit(source.path, file, source.init_kwargs)


def hub_commit(path: str, file: str, kwargs: Mapping[str, Any]) -> str | None:
    """Return the commit of a file that was loaded from the Hub, or None if it is not in the cache.

    Args:
        path: name of the repository.
        file: path of the file in the repository.
        kwargs: arguments of ``from_pretrained``, of which ``cache_dir`` and ``revision`` are used.
    """
    cached = try_to_load_from_cache(path, file, cache_dir=kwargs.get("cache_dir"), revision=kwargs.get("revision"))
    # …/snapshots/COMMIT/config.json
    return Path(cached).parents[file.count("/")].name if isinstance(cached, str) else None


def _cached_commit(path: str, file: str, kwargs: Mapping[str, Any]) -> str:
    commit = hub_commit(path, file, kwargs)
    if commit is None:
        raise ModelError(
            f"{path!r}: its commit is not in the Hub cache, so its log-probs cannot be stored; download it to a "
            "folder, or set another ref_placement"
        )
    return commit


def live_content(model: PreTrainedModel, keep: bool) -> dict[str, Any]:
    """Identify a live model by its class, its configuration, and a hash of its parameters and buffers."""
    digest = hashlib.blake2b(digest_size=16)

    def add(name: str, tensor: torch.Tensor) -> None:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.cpu().numpy().data)

    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, enabled=is_partitioned(parameter)):
            if keep:
                add(name, parameter)
        scales = getattr(parameter, "SCB", None)
        if keep and scales is not None:
            add(f"{name}.SCB", scales)
        if keep and getattr(parameter, "quant_state", None) is not None:  # needed to interpret packed weights
            for part, tensor in parameter.quant_state.as_dict(packed=True).items():
                add(f"{name}.{part}", tensor)
    if not keep:
        return {}
    for name, buffer in model.named_buffers():
        add(name, buffer)
    config = model.config.to_json_string()
    return {
        "class": type(model).__name__,
        "config": hashlib.blake2b(config.encode(), digest_size=16).hexdigest(),
        "parameters": digest.hexdigest(),
    }


def file_hashes(files: list[Path], memory: Path) -> dict[str, str]:
    """Return name -> hash of each file. A file is only read if its size or timestamp differs from the cached one."""
    known, found, stamps = _remembered(memory), {}, {}
    for file in files:
        stat = file.stat()
        place, stamp = str(file.resolve()), [stat.st_size, stat.st_mtime_ns]
        entry = known.get(place)
        if entry is None or entry[:2] != stamp:
            entry = [*stamp, file_hash(file).hex()]
            if time.time() - stat.st_mtime > _SETTLED_S:
                stamps[place] = entry
        found[file.name] = str(entry[2])
    if stamps:
        _remember(memory, known | stamps)
    return found


def _remembered(memory: Path) -> dict[str, list[Any]]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = known.items() if isinstance(known, dict) else ()
    return {name: entry for name, entry in entries if isinstance(entry, list) and len(entry) == 3}


def _remember(memory: Path, known: Mapping[str, list[Any]]) -> None:
    """Write the cache atomically. If that fails, hashes are recomputed next time."""
    partial = memory.with_name(f".{memory.name}.{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(known), encoding="utf-8")
        os.replace(partial, memory)
    partial.unlink(missing_ok=True)
