"""Compare the logs, outputs and weights of two runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

# Values that may differ: time and memory, and the name of the run, which is random.
_FREE = ("time", "_per_second", "seconds", "peak_bytes")
_LOGS = ("log.jsonl", "completions.jsonl")
_MISSING = "(missing)"


def compare(base: Path, head: Path) -> list[str]:
    """Return every difference between two output folders of a run, as ``place: key: base | head``."""
    models = {str(file.relative_to(side)) for side in (base, head) for file in side.rglob("*.safetensors")}
    if not (base / _LOGS[0]).exists() or not any((base / name).exists() for name in models):
        raise FileNotFoundError(f"{base} has no {_LOGS[0]} or no weights, so there is nothing to compare")
    found: list[str] = []
    for name in _LOGS:
        lines = [(side / name).read_text().splitlines() if (side / name).exists() else [] for side in (base, head)]
        if len(lines[0]) != len(lines[1]):
            found.append(f"{name}: lines: {len(lines[0])} | {len(lines[1])}")
        for number, (before, after) in enumerate(zip(*(map(json.loads, part) for part in lines)), start=1):
            place = before.get("event") or (f"step {before['step']}" if "step" in before else "")
            where = f"{name} line {number}{f' ({place})' if place else ''}"
            found += differences(where, dict(_flat(before)), dict(_flat(after)))
    for name in sorted(models):
        found += differences(name, _tensor_hashes(base / name), _tensor_hashes(head / name))
    return found


def _tensor_hashes(file: Path) -> dict[str, str]:
    """Return shape, dtype and a hash of each tensor; empty if the file does not exist."""
    hashes = {}
    if file.exists():
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  (no mapping)
                tensor = weights.get_tensor(name)
                data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                hashes[name] = f"{list(tensor.shape)} {tensor.dtype} {hashlib.sha256(data).hexdigest()[:12]}"
    return hashes


def _flat(record: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten a record without what may differ; keys of nested mappings are joined with dots."""
    for key, value in record.items():
        if key.endswith(_FREE) or f"{above}{key}" == "run":
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def differences(where: str, base: Mapping[str, Any], head: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys with different values as ``where: key: base | head``; NaN equals NaN."""
    for key in [*base, *(key for key in head if key not in base)]:
        before, after = base.get(key, _MISSING), head.get(key, _MISSING)
        if before != after and not (before != before and after != after):
            yield f"{where}: {key}: {before} | {after}"
