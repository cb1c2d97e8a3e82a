"""A complete job on two ranks under srun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from support.helpers import make_model, unpaired_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.ranks.client import environment
from tools.ranks.process import free_port


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command's arguments without the output folder."""
    folder = tmp_path_factory.mktemp("job")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in unpaired_rows(16)))
    model = make_model(folder / "model")
    return [
        *(str(ROOT / "launch" / "recipes" / "kto.yaml"), "--dataset_name", str(rows), "--model_name_or_path", model),
        *("--max_length", "64", "--max_prompt_length", "32"),
        *("--gradient_accumulation_steps", "2", "--learning_rate", "1e-4", "--logging_steps", "1", "--disable_tqdm"),
        *("--save_strategy", "no", "--deepspeed", "zero3", "--warmup_ratio", "0", "--max_steps", "3"),
    ]


def check_result(folder: Path) -> list[float]:
    """Check the folder of a finished run and return its losses."""
    assert AutoModelForCausalLM.from_pretrained(folder) is not None
    assert AutoTokenizer.from_pretrained(folder)("hello")["input_ids"]
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 3
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.faults
@pytest.mark.usefixtures("launch")  # to run it with the tests that start processes
def test_the_main_job_under_srun(arguments: list[str], tmp_path: Path) -> None:
    """Two plain processes that are only connected through SLURM's variables."""
    port, processes = free_port(), []
    for task in range(2):
        variables = {
            **{"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": str(ROOT),
        }
        environ = environment(**variables)
        command = [sys.executable, str(ROOT / "launch/train.py"), *arguments, "--output_dir", str(tmp_path / "out")]
        processes.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=180)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert len(check_result(tmp_path / "out")) == 3
