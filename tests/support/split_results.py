"""The results of the runs of ``drivers/runs.py``: logs and updates, and comparisons of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conftest import DRIVERS
from safetensors.torch import load_file
from torch import Tensor

from tools.ranks import RankServer

Results = dict[str, dict[str, Any]]
Update = dict[str, Tensor]


def train_all(runs: list[dict[str, Any]], world: int, folder: Path, ranks: RankServer) -> Results:
    """Train all runs in one job with ``world`` ranks; return the outcome of each run by name.

    An outcome is the driver's output, with ``logs`` (the logged steps), ``updates`` (of each step) and ``run``.
    """
    spec = folder / "spec.json"
    spec.write_text(json.dumps(runs))
    ranks.run(DRIVERS / "runs.py", spec, nproc=world, timeout=60 + 10 * len(runs))
    return {run["name"]: _outcome(run, folder) for run in runs}


def _outcome(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    outcome = json.loads((folder / f"{run['name']}.json").read_text())
    before = load_file(Path(run["model"]) / "model.safetensors")
    logs = [entry for entry in outcome["log"] if "grad_norm" in entry]
    updates = []
    for step in range(1, len(logs) + 1):
        after = load_file(folder / run["name"] / f"checkpoint-{step}" / "model.safetensors")
        updates.append({key: after[key].double() - before[key].double() for key in after})
        before = after
    return {**outcome, "logs": logs, "updates": updates, "run": run}


def norm(update: Update) -> float:
    """Return the L2 norm of an update of all weights."""
    return math.sqrt(sum(float((value**2).sum()) for value in update.values()))


def distance(one: Update, other: Update) -> float:
    """Return the norm of the difference relative to the norm of ``other``."""
    assert one.keys() == other.keys()
    return norm({key: one[key] - other[key].double() for key in one}) / norm(other)


def assert_same(
    found: dict[str, float], expected: dict[str, float], tolerance: float, what: str, names: Iterable[str]
) -> None:
    """Compare metrics by name. A metric that only one side has is a difference."""
    for name in names:
        assert (name in found) == (name in expected), f"{what}: {name}"
        if name in expected:
            # Relative for the optimized values; a margin is a small difference of rewards of order one.
            relative = name in ("loss", "grad_norm", "learning_rate")
            scale = abs(expected[name]) if relative else max(abs(expected[name]), 1.0)
            error = abs(found[name] - expected[name])
            assert error <= tolerance * scale, f"{what}: {name} {found[name]} {expected[name]}"


def assert_logged(found: dict[str, float], expected: dict[str, float], tolerance: float, what: str) -> None:
    """Compare all values logged by two steps."""
    assert_same(found, expected, tolerance, what, sorted((found.keys() | expected.keys()) - {"epoch"}))
