"""Compare a resumed run with a run that was never interrupted. Only times may differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# In addition to times: the memory of the process, and the phase of saving, which has not ended when the state is
# written.
_TIMES = ("runtime", "per_second", "seconds", "peak_bytes")
_UNFINISHED = "save"
# Files with durations, or with the length of a log that has one more line; they are parsed as JSON and compared.
_TIMED = ("run_state", "trainer_state", "manifest")


def differences(whole: Path, after: Path, point: int) -> list[str]:
    """Return bitwise differences of final weights, logs, tables, states, and all later checkpoints.

    Args:
        whole: folder of the uninterrupted run, as written by ``drivers/resume_runs.py``.
        after: folder of the resumed run.
        point: step from which it was resumed.
    """
    found = [*_files(whole / "final", after / "final"), *_logs(whole / "out", after / "out")]
    if timeless(_read(whole / "history.json")) != timeless(_read(after / "history.json")):
        found.append("state.log_history")
    found += _state(whole / "out" / "trainer_state.json", after / "out" / "trainer_state.json")
    for folder in sorted((whole / "out").glob("checkpoint-*")):
        if int(folder.name.partition("-")[2]) > point:
            found += _files(folder, after / "out" / folder.name)
    return found


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def timeless(value: Any) -> Any:
    """Return a record without times and related values."""
    if isinstance(value, dict):
        timed = {name for name in value if name == "time" or any(part in name for part in _TIMES)}
        left = {name: each for name, each in value.items() if name not in timed}
        return {name: timeless(each) for name, each in left.items() if name != _UNFINISHED}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def _files(whole: Path, after: Path) -> Iterator[str]:
    """Compare the names and contents of the files in two folders."""
    names = [{path.name for path in folder.iterdir()} for folder in (whole, after)]
    yield from (f"{whole.name}: {name} is in one of them only" for name in sorted(names[0] ^ names[1]))
    for name in sorted(names[0] & names[1]):
        one, other = whole / name, after / name
        if name.startswith(_TIMED):
            yield from _state(one, other)
        elif one.read_bytes() != other.read_bytes():
            yield f"{whole.name}/{name}"


def _logs(whole: Path, after: Path) -> Iterator[str]:
    """Compare logs, of which the resumed one has one more line, and tables of completions."""
    one, other = ([json.loads(line) for line in (f / "log.jsonl").read_text().splitlines()] for f in (whole, after))
    resumes = [line for line in other if line.get("event") == "resume"]
    if len(resumes) != 1:
        yield f"log.jsonl: {len(resumes)} resume events"
    other = [line for line in other if line.get("event") != "resume"]
    if timeless(one) != timeless(other):
        yield "log.jsonl"
    tables = [folder / "completions.jsonl" for folder in (whole, after)]
    if tables[0].exists() != tables[1].exists():
        yield "completions.jsonl is in one of them only"
    elif tables[0].exists() and tables[0].read_bytes() != tables[1].read_bytes():
        yield "completions.jsonl"


def _state(whole: Path, after: Path) -> Iterator[str]:
    """Compare two state files part by part."""
    one, other = (_comparable(_read(path), path.parent) for path in (whole, after))
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            yield f"{whole.parent.name}/{whole.name}: {name}"


def _comparable(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a state without times, the number of the attempt, the length of the log, and the output folder."""
    found: dict[str, Any] = timeless(state)
    for name in ("log", "files", "checksum"):
        found.pop(name, None)
    if isinstance(found.get("run"), dict):
        found["run"].pop("attempt")
    for holder in (found, found.get("trainer", {})):
        if holder.get("best_model_checkpoint"):
            out = folder.parent if folder.name.startswith("checkpoint-") else folder
            holder["best_model_checkpoint"] = holder["best_model_checkpoint"].removeprefix(f"{out}/")
    return found
