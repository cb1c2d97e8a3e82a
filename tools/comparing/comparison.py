"""Compare the logs, outputs and weights of two runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

# Values that may differ: time and memory.
_TIMED = ("time", "_per_second", "seconds", "peak_bytes")
_LOGS = ("log.jsonl", "completions.jsonl")


@dataclass(frozen=True)
class Difference:
    """A value that differs.

    Attributes:
        run: name of the run.
        where: the file, and the step or event in a log.
        key: key of the value; nested keys are joined with dots.
        base: value on one side; :data:`MISSING` if it does not exist.
        head: value on the other side.
    """

    run: str
    where: str
    key: str
    base: Any
    head: Any

    def __str__(self) -> str:
        return f"{self.run}: {self.where}: {self.key}: {self.base} | {self.head}"


MISSING = "(missing)"


def compare(run: str, base: Path, head: Path, renamed: Mapping[str, str]) -> list[Difference]:
    """Return every difference between two output folders of a run.

    Args:
        run: name of the run.
        base: output folder of one side.
        head: output folder of the other side.
        renamed: renamed log keys: name on the side of ``base`` -> current name.

    Raises:
        FileNotFoundError: ``base`` contains no log or no weights.
    """
    found: list[Difference] = []
    if not (base / _LOGS[0]).exists() or not _models(base):
        raise FileNotFoundError(f"{base} has no {_LOGS[0]} or no weights, so there is nothing to compare")
    for name in _LOGS:
        found += _compare_lines(run, name, _lines(base / name), _lines(head / name), renamed)
    for name in sorted({*_models(base), *_models(head)}):
        before, after = (tensor_hashes(folder / name) for folder in (base, head))
        found += _compare_values(run, name, before, after)
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a log without the run's name, which is random."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{name: value for name, value in line.items() if name != "run"} for line in lines]


def _models(folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in folder.rglob("*.safetensors")]


def tensor_hashes(file: Path) -> dict[str, str]:
    """Return shape, dtype and a hash of each tensor; empty if the file does not exist."""
    if not file.exists():
        return {}
    hashes = {}
    with safe_open(file, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118  (no mapping)
            tensor = weights.get_tensor(name)
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            hashes[name] = f"{list(tensor.shape)} {tensor.dtype} {hashlib.sha256(data).hexdigest()[:12]}"
    return hashes


def _compare_lines(
    run: str, name: str, base: list[dict[str, Any]], head: list[dict[str, Any]], renamed: Mapping[str, str]
) -> Iterator[Difference]:
    if len(base) != len(head):
        yield Difference(run, name, "lines", len(base), len(head))
    for number, (before, after) in enumerate(zip(base, head), start=1):
        place = before.get("event") or (f"step {before['step']}" if "step" in before else "")
        where = f"{name} line {number}{f' ({place})' if place else ''}"
        yield from _compare_values(run, where, dict(_flat(before, renamed)), dict(_flat(after, {})))


def _flat(record: Mapping[str, Any], renamed: Mapping[str, str], above: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten a record without time and memory; keys of nested mappings are joined with dots."""
    for key, value in record.items():
        key = renamed.get(key, key)
        if key.endswith(_TIMED):
            continue
        if isinstance(value, dict):
            yield from _flat(value, renamed, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _compare_values(run: str, where: str, base: Mapping[str, Any], head: Mapping[str, Any]) -> Iterator[Difference]:
    for key in [*base, *(key for key in head if key not in base)]:
        before, after = base.get(key, MISSING), head.get(key, MISSING)
        if before != after and not (before != before and after != after):  # NaN equals NaN
            yield Difference(run, where, key, before, after)
