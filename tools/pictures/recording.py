"""The recorded data behind the pictures, and how the runs of the demo are recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
DEMO = "demo.json"
BESIDE_TRL = "beside_trl.json"
RUNS = {"kto": "KTO", "kto_lora": "KTO, LoRA", "cpo": "CPO", "online_dpo": "Online DPO"}
_CURVES = ("rewards/margins", "rewards/accuracies", "objective/scores")
_MODEL_ROW = re.compile(r"^\| (before|after [^|]+?) +\| +([\d.]+) \| +([\d.]+) \| +(-?[\d.]+) \|", re.MULTILINE)


def load(name: str) -> dict[str, Any]:
    """The recorded data in ``docs/pictures/data/NAME``."""
    data: dict[str, Any] = json.loads((PICTURES / "data" / name).read_text(encoding="utf-8"))
    return data


def save(name: str, data: dict[str, Any]) -> None:
    """Write ``data`` to ``docs/pictures/data/NAME``."""
    (PICTURES / "data" / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def record_demo(folder: Path) -> dict[str, Any]:
    """The table and the runs of a finished demo.

    Returns:
        ``models``: for each row of the demo's table, the preferred and correct shares and the mean reward.
        ``runs``: for each run its curves, as lists over ``step``, and the seconds and peak memory of each phase.

    Raises:
        FileNotFoundError: the demo has not finished in ``folder``.
        ValueError: its table does not have every model.
    """
    page = (folder / "demo.md").read_text(encoding="utf-8")
    models = {
        title: {"preferred": float(preferred), "correct": float(correct), "reward": float(reward)}
        for title, preferred, correct, reward in _MODEL_ROW.findall(page)
    }
    if len(models) != len(RUNS) + 1:
        raise ValueError(f"{folder / 'demo.md'}: expected a table with {len(RUNS) + 1} models, found {list(models)}")
    return {"models": models, "runs": {name: _run(folder / name / "log.jsonl") for name in RUNS}}


def _run(log: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "loss" in record]
    curves = {
        name: [round(r[name], 4) for r in steps] for name in _CURVES if all(r.get(name) is not None for r in steps)
    }
    phases = next(record["phases"] for record in records if record.get("event") == "end")
    measured = {name: {key: phase[key] for key in ("seconds", "peak_bytes")} for name, phase in phases.items()}
    return {"step": [record["step"] for record in steps], "curves": curves, "phases": measured}
