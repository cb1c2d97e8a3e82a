"""Output folders whose reports have every section, or markup wherever a run can have text of a user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.run_folders import at, end, entry, start, write_checkpoint, write_log, write_status

NASTY = '</script></style><img src=x onerror="alert(1)">&\''


def write_options(folder: Path, **values: Any) -> None:
    known = {"method": "kto", "learning_rate": 1e-6, "beta": 0.1, "output_dir": str(folder)}
    (folder / "options.json").write_text(json.dumps({**known, **values}))


def write_completions(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def whole_run(folder: Path) -> None:
    """With everything that a report can show."""
    data = {
        "role": "training", "where": "rows.jsonl", "rows_in": 70, "rows_out": 64, "dropped": {"empty completion": 6},
        "prompts_cut": 3, "lengths": {"prompt": {"min": 2, "p50": 12, "p90": 20, "p99": 31, "max": 1031}},
    }  # fmt: skip
    more = {
        "data": [data], "advice": ["use more rows"], "model": "some/model", "device": "cuda",
        "versions": {"torch": "2.13.0"}, "models": "policy: some/model, ZeRO stage 2; reference: offload",
    }  # fmt: skip
    resume = {"event": "resume", "step": 40, "attempt": 2, "checkpoint": "checkpoint-40", "world_size": 4}
    write_log(
        folder,
        [
            {**start(), **more},
            entry(20, 20, 200, kl=0.5, learning_rate=1e-4),
            {"eval_loss": 0.75, "step": 20, "epoch": 0.2, "time": at(21)},
            {"event": "bad_step", "step": 30, "time": at(30)},
            entry(40, 40, 400, kl=0.25, learning_rate=5e-5),
            {**resume, "time": at(400)},
            entry(100, 500, 1000, kl=0.125, learning_rate=0.0),
            {"eval_loss": 0.25, "step": 100, "epoch": 1.0, "time": at(501)},
            *end({"train": 30.0, "save": 10.0}),
        ],
    )
    write_status(folder, state="finished", step=100, attempt=2, world_size=4)
    write_options(folder, learning_rate=0.01, hub_token="hf_abcdefghijkl", load_best_model_at_end=True)
    write_checkpoint(folder, 100)
    (folder / "trainer_state.json").write_text('{"best_global_step": 100}')


def nasty_run(folder: Path) -> None:
    """With markup wherever a run can have text of a user."""
    what = {"run_name": NASTY, "model": NASTY, "models": f"policy: {NASTY}", "advice": [NASTY], "method": NASTY}
    data = {"role": NASTY, "where": NASTY, "dropped": {NASTY: 1}, "lengths": {NASTY: {NASTY: 1}}}
    records = [
        {**start(), **what, "data": [data], "versions": {NASTY: NASTY}},
        {**entry(1, 1, 1), NASTY: 1.0, f"eval_{NASTY}_loss": 1.0},
        {f"eval_{NASTY}_loss": 1.0, "step": 1},
        entry(40, 40, 40),
        *end({NASTY: 1.0}),
    ]
    write_log(folder, records)
    write_status(folder, state="failed", error=NASTY, method=NASTY, job=NASTY)
    write_options(folder, run_name=NASTY, column_map={NASTY: NASTY}, method=NASTY, **{NASTY: NASTY})
    row = {"step": 1, "dataset": NASTY, "prompt": NASTY, "policy": NASTY, NASTY: 1.5, "reference": NASTY}
    write_completions(folder, [row, {**row, "step": 2}])
    (folder / f"checkpoint-{7}").mkdir()
    (folder / "checkpoint-7" / "model.safetensors").write_text("")
