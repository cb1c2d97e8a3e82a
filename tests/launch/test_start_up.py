"""What is imported when, and how few frames lie between the command and the gradient. Times are CPU seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DRIVERS, ROOT, Launch
from support.bad_case import Case
from support.bad_commands import command
from support.helpers import make_model
from support.run_folders import write_checkpoint

from tools.ranks.client import environment

# `--help` takes 0.2 s on an idle core and 0.5 s on a shared one; torch alone takes 1.1 s.
ANSWER_S = 0.8
ANSWERS = """
import json, resource, sys
from alignment.cli.commands import main
try:
    main(sys.argv[1:])
except SystemExit as leaving:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([leaving.code, usage.ru_utime + usage.ru_stime, sorted(sys.modules)]))
"""
LIBRARIES = {"torch", "deepspeed", "transformers", "datasets", "numpy"}
# A run that trains all weights by rows needs none of these before its report is drawn.
UNUSED = {"peft", "bitsandbytes", "matplotlib", "tensorboard", "wandb", "functorch.compile", "networkx"}
UNUSED |= {"torch._inductor.compile_fx", "torch._inductor.lowering"}
ONLINE = ("alignment.rollout", "alignment.rewards", "alignment.online", "alignment.methods.online_dpo")


def python(code: str, *arguments: object) -> str:
    """Return the output of a process that runs ``code``."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def online(modules: list[str]) -> list[str]:
    return [name for name in modules if name.startswith(ONLINE) and not name.endswith("_options")]


@pytest.mark.parametrize(
    "arguments, code",
    [
        ("train --help", 0),
        ("train --method kto --learning_rat 1", 1),
        ("submit kto --dataset_name rows.jsonl --output_dir out --print", 0),
        ("status {folder}", 0),
    ],
    ids=["help", "misspelled", "submit", "status"],
)
def test_errors_about_options_import_no_library(arguments: str, code: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)
    seconds = []
    for _ in range(3):  # other processes can slow it down, but never speed it up
        answer = json.loads(python(ANSWERS, *arguments.format(folder=tmp_path).split()).splitlines()[-1])
        assert answer[0] == code and LIBRARIES.isdisjoint(answer[2])
        seconds.append(answer[1])
        if seconds[-1] < ANSWER_S:
            return
    pytest.fail(f"CPU seconds of three runs: {seconds}")


@pytest.fixture
def kto_run(tmp_path: Path) -> list[str]:
    """Options of a run of one step."""
    make_model(tmp_path / "good")
    return command(Case("kto", (), {"save_strategy": "no", "disable_tqdm": "true"}), tmp_path, tmp_path)


@pytest.mark.ci
def test_a_kto_run_only_imports_what_it_needs_and_has_few_frames_above_the_gradient(
    kto_run: list[str], tmp_path: Path, launch: Launch
) -> None:
    """So that a run starts quickly, and a reader can follow it."""
    found = tmp_path / "found.json"
    done = launch(DRIVERS / "first_step.py", found, *kto_run, launcher="python")
    assert found.is_file(), done.stderr
    frames, modules = json.loads(found.read_text())
    assert frames[0].startswith("launch/train.py") and frames[-1].endswith("scoring.py:backward")
    assert len(frames) <= 11, frames
    assert {"torch", "deepspeed", "transformers.trainer_callback", "alignment.methods.kto"} <= set(modules)
    assert UNUSED.intersection(modules) == set()
    assert online(modules) == []
    methods = {"alignment.methods.cpo", "alignment.methods.dpo", "alignment.methods.sft", "alignment.methods.reward"}
    assert methods.isdisjoint(modules)


@pytest.mark.ci
def test_each_public_name_only_imports_what_it_needs() -> None:
    said = python("""
import json, sys
import alignment
found = [sorted(sys.modules)]
from alignment import KTOConfig, OnlineDPOConfig
found.append(sorted(sys.modules))
from alignment import CPOTrainer, DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
print(json.dumps([*found, sorted(sys.modules)]))
""")
    package, options, trainers = json.loads(said.splitlines()[-1])
    assert LIBRARIES.isdisjoint(package) and LIBRARIES.isdisjoint(options)
    assert UNUSED.intersection(trainers) == set()
    assert online(trainers) == []
