"""Checkpoints written by an earlier version, as zip files in ``tests/data/checkpoints``, and how their runs continued.

``PYTHONPATH=.:tests python tests/support/earlier_checkpoints.py`` writes them again, which is only right where the
format of checkpoints changes on purpose: they prove that a run started before an upgrade continues after it.
"""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from support.resume_grid import POINTS, runs_of

FOLDER = Path(__file__).parents[1] / "data" / "checkpoints"
METHODS = ("KTO", "CPO", "OnlineDPO", "DPO", "SFT", "Reward", "KTO-lora", "KTO-qlora")
STAGES = ("stage0", "stage2", "stage3")
POINT = POINTS["epoch"]


def cases() -> list[dict[str, Any]]:
    """Return the cells of the grid: one rank, fp32."""
    fixed = {"ranks": 1, "optimizer": "adamw_torch", "dtype": "fp32", "course": "counting", "point": "epoch"}
    return [{"method": method, "stage": stage, **fixed} for method in METHODS for stage in STAGES]


def label(case: dict[str, Any]) -> str:
    """Return the name of a case's file."""
    return f"{case['method']}-{case['stage']}"


def unpacked(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Extract the run of a case into its folder as ``whole``; return the run for ``drivers/resume_runs.py``."""
    with zipfile.ZipFile(FOLDER / "models.zip") as archive:
        archive.extractall(folder / "models")
    run = runs_of([case], {name: str(folder / "models" / name) for name in ("model", "classifier")})[0]
    run["args"]["pack"] = "false"  # that version padded rows, whose dropout is drawn in another order
    with zipfile.ZipFile(FOLDER / f"{label(case)}.zip") as archive:
        archive.extractall(folder / run["name"] / "whole")
    return run


def machine() -> dict[str, str]:
    """Return what rounding depends on; between equal machines, equal runs are bitwise equal."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return {"cpu": models[0] if models else "", "torch": torch.__version__, "threads": str(torch.get_num_threads())}


def earlier_machine() -> dict[str, str]:
    """Return :func:`machine` as it was where the checkpoints were written."""
    return json.loads((FOLDER / "machine.json").read_text())


def _keep(folder: Path, target: Path) -> None:
    """Pack the models, or a run without the checkpoints after the point of resume."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as archive:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            step = name.removeprefix("out/checkpoint-").partition("/")[0]
            wanted = not name.startswith("out/checkpoint-") or step == str(POINT)
            if path.is_file() and wanted and not name.endswith((".html", ".lock")):
                archive.write(path, name)


def write() -> None:
    """Train the runs of all cases and pack them."""
    from support.helpers import make_classifier, make_model
    from tools.ranks import RankServer

    (FOLDER / "machine.json").write_text(json.dumps(machine(), indent=1) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        for make, name in ((make_model, "model"), (make_classifier, "classifier")):
            make(models / name, "narrow", seed=1, layers=1, dropout=0.1)
        _keep(models, FOLDER / "models.zip")
        runs = runs_of(cases(), {name: str(models / name) for name in ("model", "classifier")})
        spec = Path(folder) / "spec.json"
        spec.write_text(json.dumps(runs))
        server = RankServer(Path(__file__).parents[2])
        server.run(Path(__file__).parent / "drivers" / "resume_runs.py", spec, nproc=1, timeout=600)
        server.close()
        for case, run in zip(cases(), runs, strict=True):
            _keep(Path(folder) / run["name"] / "whole", FOLDER / f"{label(case)}.zip")


if __name__ == "__main__":
    write()
