"""The runs of ``test_bad_steps.py`` and the values that must be equal between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.helpers import STAGES, paired_rows, unpaired_rows
from support.resume_comparison import timeless

Case = tuple[str, str, int, str, str]
STEPS, RESUMED = 8, 4
FAULTS = (("gradient", [0, 2]), ("loss", [1, 0]), ("spike", [1, 2]))
LEFT_OUT = [window for _, window in FAULTS]
# Stage, dtype, ranks, method, trained weights.
CASES: tuple[Case, ...] = (
    ("stage0", "fp32", 1, "KTO", "full"),
    ("stage0", "bf16", 2, "CPO", "full"),
    ("stage2", "fp32", 2, "CPO", "full"),
    ("stage2", "bf16", 1, "SFT", "full"),
    ("stage3", "fp32", 2, "SFT", "full"),
    ("stage3", "bf16", 1, "KTO", "lora"),
    ("stage2-offload", "fp32", 2, "CPO", "full"),
    ("stage2", "fp32", 2, "OnlineDPO", "full"),
)


def name_of(case: Case) -> str:
    """Return a name for tests and folders."""
    return "-".join(map(str, case))


def run_of(case: Case, model: str, **more: Any) -> dict[str, Any]:
    """Return the undisturbed run of a case for ``drivers/bad_steps.py``."""
    stage, dtype, ranks, method, trained = case
    args = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4 // 2 // ranks,
        "num_train_epochs": 2,
        "learning_rate": 5e-3,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "bf16": dtype == "bf16",
        "use_peft": trained == "lora",
        "dataloader_num_workers": int(method == "SFT" and ranks == 1),
        "deepspeed": STAGES[stage],
        "max_length": 64,
        **({"max_new_tokens": 6, "log_completions": 1} if method == "OnlineDPO" else {"max_prompt_length": None}),
        "logging_steps": 1,
        "save_steps": 2,
        "include_num_input_tokens_seen": True,
        "disable_tqdm": True,
        **more,
    }
    rows = unpaired_rows if method in ("KTO", "SFT") else paired_rows
    train = rows(16, 3)
    if method == "OnlineDPO":
        train = [{"prompt": row["prompt"]} for row in train]
    return {"name": name_of(case), "method": method, "model": model, "args": args, "train": train}


def runs_of(case: Case, model: str) -> list[dict[str, Any]]:
    """Return a run with three bad steps, its resumption from a checkpoint, and a run that skips these windows."""
    ranks, dropout = case[2], {"lora_dropout": 0.0} if case[4] == "lora" else {}
    whole = run_of(case, model, on_bad_step="skip", loss_spike_factor=4, **dropout)
    plain = run_of(case, model, **dropout)
    # A gradient that is NaN on one rank; losses are summed over ranks.
    spoilt = [
        {"kind": kind, "window": window, "rank": number % ranks} for number, (kind, window) in enumerate(FAULTS, 1)
    ]
    name = whole["name"]
    return [
        {**whole, "faults": spoilt},
        {**plain, "name": f"{name}-without", "left_out": LEFT_OUT},
        {**whole, "name": f"{name}-again", "faults": spoilt, "from": [name, RESUMED]},
    ]


def outcome(folder: Path) -> dict[str, Any]:
    """Read the results of a run."""
    return json.loads((folder / "outcome.json").read_text())


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the log lines of one kind."""
    lines = map(json.loads, (folder / "out" / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("event") == kind]


def state_of(folder: Path, step: int = STEPS) -> dict[str, Any]:
    """Return the parts of a checkpoint that are shared by all ranks."""
    return json.loads((folder / "out" / f"checkpoint-{step}" / "run_state.json").read_text())


def compared(history: Any) -> Any:
    """Return a history without times, counts of bad windows, and values of windows without rows."""
    counts = ("bad_steps", "windows_without_kl", "windows_without_pairs", "beta")
    return [{name: each for name, each in line.items() if each and name not in counts} for line in timeless(history)]


def differences(one: Path, other: Path, first: int = 1) -> list[str]:
    """Return bitwise differences of weights, optimizer and history: in checkpoints from a step on, and at the end."""
    found = []
    pairs = zip(*(compared(outcome(place)["history"]) for place in (one, other)), strict=True)
    found += [f"step {x['step']}: {k}: {x.get(k)} {y.get(k)}" for x, y in pairs for k in x | y if x.get(k) != y.get(k)]
    names = ["final", *(f"out/checkpoint-{step}" for step in range(2, STEPS + 1, 2) if step >= first)]
    for name in names:
        files = {path.name for folder in (one, other) for path in (folder / name).glob("*.safetensors")}
        for file in sorted(files):
            pair = [folder / name / file for folder in (one, other)]
            if not all(path.exists() for path in pair) or pair[0].read_bytes() != pair[1].read_bytes():
                found.append(f"{name}/{file}")
        assert files
    return found
