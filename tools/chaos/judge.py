"""Check an output folder without using the package: is every checkpoint complete, is anything missing?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from tools.comparing.comparison import differences

_TIMES = ("time", "per_second")
_LOG, _COMPLETIONS = "log.jsonl", "completions.jsonl"
_STATE = "trainer_state.json"


@dataclass(frozen=True)
class Look:
    """The steps of an output folder's complete checkpoints, in order, and its problems, one line each."""

    steps: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint folder."""
    return int(folder.name.removeprefix("checkpoint-"))


def look(output_dir: Path) -> Look:
    """Check everything that has its final name. The run may have been killed a moment ago."""
    folders = sorted(output_dir.glob("checkpoint-*"), key=step_of)
    problems = [problem for folder in folders for problem in _damage(folder)]
    problems += [f"{path.name}: moved aside by a restart" for path in output_dir.glob("previous-*")]
    if folders and not problems:
        best = json.loads((folders[-1] / _STATE).read_text())["best_model_checkpoint"]
        if best is not None and Path(best).name not in [folder.name for folder in folders]:
            problems.append(f"{folders[-1].name}: its best checkpoint, {Path(best).name}, is missing")
    for path in sorted(output_dir.glob("[!.]*.json*")):
        # Only the last line of a log may be incomplete.
        lines = path.read_text().splitlines(keepends=True) if path.suffix == ".jsonl" else [f"{path.read_text()}\n"]
        if not all(_is_json(line) for line in lines if line.endswith("\n")):
            problems.append(f"{path.name}: half-written")
    for path in output_dir.glob("*.safetensors"):
        try:
            safe_open(path, "pt")
        except SafetensorError as error:
            problems.append(f"{path.name}: half-written ({error})")
    return Look(tuple(map(step_of, folders)), tuple(problems))


def _damage(folder: Path) -> Iterator[str]:
    """Return the problems of a checkpoint according to its manifest: files, checksums, unlisted files."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        listed = {name: file["checksum"] for name, file in manifest["files"].items()}
    except (OSError, ValueError, LookupError) as error:
        yield f"{folder.name}: the manifest is missing or unreadable ({error!r})"
        return
    if manifest["step"] != step_of(folder):
        yield f"{folder.name}: the manifest is of step {manifest['step']}"
    present = {
        str(path.relative_to(folder)): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    for name in sorted(present.keys() | listed.keys()):
        if present.get(name) != listed.get(name):
            yield f"{folder.name}: {name} is missing, unlisted or not that of the manifest"


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def lost(before: Look, after: Look, limit: int) -> list[str]:
    """Return checkpoints that were deleted although there are fewer than ``limit`` others, or no newer one."""
    gone = sorted(set(before.steps) - set(after.steps))
    if not gone or (max(after.steps, default=0) >= max(before.steps) and len(after.steps) >= limit):
        return []
    return [f"checkpoint-{step} was deleted; only {list(after.steps)} are left" for step in gone]


def compare(output_dir: Path, reference: Path, resumes: Sequence[int]) -> list[str]:
    """Return the differences between a finished run and one that was never killed, as ``place: expected | found``.

    ``resumes`` are the steps of the checkpoints from which the run was resumed, in order.
    """
    problems = [f"{path.name}: left behind" for path in sorted(output_dir.iterdir()) if path.name.startswith(".")]
    names, expected = ({path.name for path in folder.iterdir()} for folder in (output_dir, reference))
    problems += [f"{name}: {'not expected' if name in names else 'missing'}" for name in sorted(names ^ expected)]
    same = [*sorted(str(path.relative_to(reference)) for path in reference.rglob("*.safetensors")), _COMPLETIONS]
    for name in same:
        contents = [path.read_bytes() if path.is_file() else None for path in (output_dir / name, reference / name)]
        if contents[0] != contents[1]:
            problems.append(f"{name}: the content differs")
    problems += _compare_logs(output_dir / _LOG, reference / _LOG, resumes)
    return [*problems, *differences(_STATE, _state(reference), _state(output_dir))]


def _compare_logs(path: Path, reference: Path, resumes: Sequence[int]) -> Iterator[str]:
    records, expected = _records(path), _records(reference)
    told = [record for record in records if record.get("event") == "resume"]
    if [record["step"] for record in told] != list(resumes):
        yield f"{_LOG}: resumed after {[record['step'] for record in told]}, expected {list(resumes)}"
    attempts = [record["attempt"] for record in told]
    if attempts != sorted({1, *attempts})[1:]:  # attempts without a new checkpoint are counted, but not in the log
        yield f"{_LOG}: attempts are numbered {attempts}"
    own, other = ([without_times(one) for one in part if one.get("event") != "resume"] for part in (records, expected))
    missing: dict[str, Any] = {}
    for number, (record, wanted) in enumerate(itertools.zip_longest(own, other, fillvalue=missing), 1):
        yield from differences(f"{_LOG} record {number}", wanted, record)


def _records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if _is_json(line)]


def without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of the log without values that differ between runs."""
    own = ("run", "phases", "run_name")
    return {k: v for k, v in record.items() if k not in own and not any(part in k for part in _TIMES)}


def _state(output_dir: Path) -> dict[str, Any]:
    """Return the state of transformers without times and paths."""
    state: dict[str, Any] = json.loads((output_dir / _STATE).read_text())
    best, history = state["best_model_checkpoint"], [without_times(record) for record in state["log_history"]]
    return {**state, "log_history": history, "best_model_checkpoint": best and Path(best).name}
