"""Runs with Liger kernels in Triton's interpreter have the same results as runs without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS, run_launched
from safetensors.torch import load_file
from support.helpers import STAGES, make_model, options

ROWS = [{"prompt": "abc", "chosen": "defg", "rejected": "hi"}, {"prompt": "jk", "chosen": "l", "rejected": "mnop"}]
# A full model at stages 0 and 3, with recomputed layers at stage 3; adapters, whose reference is the policy without
# them.
CASES: dict[str, dict[str, Any]] = {
    "whole": {"deepspeed": STAGES["stage0"], "gradient_checkpointing": False, "ref_placement": "replica"},
    "divided": {"deepspeed": STAGES["stage3"], "gradient_checkpointing": True, "ref_placement": "sharded"},
    "adapters": {"deepspeed": STAGES["stage2"], "gradient_checkpointing": True, "use_peft": True, "lora_dropout": 0.0},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case with and without kernels, in one process, because imports take longer than the runs."""
    folder = tmp_path_factory.mktemp("runs")
    runs = []
    for kind in ("tied", "capped"):
        make_model(folder / kind, kind, layers=1)
    for name, case in CASES.items():
        for kernels in (False, True):
            label = f"{name}-{kernels}"
            args = options(
                folder / label,
                **{"per_device_train_batch_size": 1, "max_steps": 2, "learning_rate": 0.1, "optim": "sgd", **case},
                use_liger_kernel=kernels,
            )
            model = str(folder / ("capped" if name == "adapters" else "tied"))
            save = str(folder / label / "saved")
            runs.append({"name": label, "trainer": "DPO", "model": model, "args": args, "train": ROWS, "save": save})
    (folder / "spec.json").write_text(json.dumps(runs))
    env = {"DS_ACCELERATOR": "cpu"}
    done = run_launched(DRIVERS / "liger_runs.py", folder / "spec.json", launcher="python", timeout=400, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def update(trained: Path, label: str, start: str) -> torch.Tensor:
    """Return the change of all saved weights as one vector; for adapters their values, half of which start at 0."""
    adapters = trained / label / "saved" / "adapter_model.safetensors"
    if adapters.is_file():
        return torch.cat([value.flatten() for _, value in sorted(load_file(adapters).items())])
    before = load_file(trained / start / "model.safetensors")
    after = load_file(trained / label / "saved" / "model.safetensors")
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)])


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_results_match_those_without_kernels(trained: Path, name: str) -> None:
    plain, ours = (json.loads((trained / f"{name}-{kernels}.json").read_text())["log"] for kernels in (False, True))
    keys = [key for key in plain[0] if key.startswith(("loss", "logps", "rewards", "grad_norm", "entropy"))]
    assert len(keys) > 5
    for before, after in zip(plain[:2], ours[:2], strict=True):
        for key in keys:
            assert after[key] == pytest.approx(before[key], rel=1e-4, abs=1e-5), key
    expected, found = (update(trained, f"{name}-{kernels}", "tied") for kernels in (False, True))
    assert float(expected.norm()) > 1e-3 and not torch.equal(found, expected), "kernels round in another way"
    assert float((found - expected).norm() / expected.norm()) < 1e-4
