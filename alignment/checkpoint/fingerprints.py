"""Fingerprints of models, adapters and code, by which a resumed run recognizes them.

A model is sampled, not read completely: its configuration, the size of every weight file and pieces of each. That
distinguishes models that were trained differently; it does not detect damage.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import PreTrainedModel

from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource
from alignment.references.content import hub_commit

_WEIGHTS = ("*.safetensors", "*.bin")
_PIECES, _PIECE = 16, 1 << 16  # pieces of a weight file, evenly spaced, and bytes per piece
_ELEMENTS = 1024  # leading elements of a live parameter


def without_path(fingerprint: str | None) -> str | None:
    """Return the part of a fingerprint that is compared: all but the path, which may change."""
    return fingerprint and fingerprint.partition(" (")[0]


def fingerprint(content: Any) -> str:
    """Return a hash of anything that JSON, or else ``str``, can represent."""
    return _hash([json.dumps(content, sort_keys=True, default=str).encode()])


def model_fingerprint(source: ModelSource) -> str:
    """Return a fingerprint of a model's content, independent of its path; collective if live and partitioned."""
    config = source.config.to_dict()
    config = {name: value for name, value in config.items() if name not in ("_name_or_path", "transformers_version")}
    if source.live is not None:
        return f"{fingerprint({'config': config, 'parameters': _hash(_parameters(source.live))})} (a live model)"
    content = _stored(str(source.path), source.init_kwargs)
    return f"{fingerprint({'config': config, 'content': content})} ({source.path})"


def adapter_fingerprint(adapters: Adapters) -> str:
    """Return a fingerprint of the configuration of adapters, and of their weights if they are loaded from a path."""
    config = {name: value for name, value in adapters.config.to_dict().items() if name != "base_model_name_or_path"}
    config = {n: sorted(map(str, v)) if isinstance(v, (set, list)) else v for n, v in config.items()}
    return fingerprint({"config": config, "content": None if adapters.path is None else _stored(adapters.path, {})})


def code_fingerprint(code: Any) -> str:
    """Return a fingerprint of a user's function or object: its name, and a hash of its source if available.

    For this package's own objects, ``identity`` replaces the source.
    """
    while isinstance(code, functools.partial):
        code = code.func
    named = code if hasattr(code, "__qualname__") else type(code)
    own = getattr(code, "identity", None)
    try:
        return f"{named.__qualname__} {fingerprint(own if isinstance(own, Mapping) else inspect.getsource(named))}"
    except (OSError, TypeError):
        return str(named.__qualname__)


def _stored(path: str, kwargs: Mapping[str, Any]) -> Any:
    """Sample the weight files of a folder; for a Hub model, return name, revision and commit."""
    folder = Path(path) / kwargs.get("subfolder", "")
    if not folder.is_dir():
        file = "/".join(part for part in (kwargs.get("subfolder", ""), "config.json") if part)
        return [path, kwargs.get("revision"), hub_commit(path, file, kwargs)]
    files = sorted({file for pattern in _WEIGHTS for file in folder.glob(pattern)})
    return {file.name: [file.stat().st_size, _hash(_pieces(file))] for file in files}


def _pieces(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        for number in range(_PIECES):
            opened.seek(max(0, size - _PIECE) * number // (_PIECES - 1))
            yield opened.read(_PIECE)


def _parameters(model: PreTrainedModel) -> Iterator[bytes]:
    """Sample a live model's parameters, gathering each one if partitioned."""
    for name, parameter in model.named_parameters():
        yield f"{name} {parameter.dtype}".encode()
        with deepspeed.zero.GatheredParameters(parameter, enabled=is_partitioned(parameter)):
            flat = parameter.detach().reshape(-1)[:_ELEMENTS].contiguous()
            yield flat.view(torch.uint8).cpu().numpy().tobytes()


def _hash(pieces: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
