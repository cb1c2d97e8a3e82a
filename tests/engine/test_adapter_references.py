"""A reference that is the policy itself: equal to a frozen copy, before and after training and in every placement."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from conftest import DRIVERS
from peft import PeftModel
from safetensors.torch import load_file
from support.adapter_grid import BITS, Combination, adapter_run
from support.helpers import train_and_close
from support.oracle.adapters import adapted, completion_logps, dense_base
from support.split_results import assert_logged, distance
from torch import Tensor
from transformers import AutoModelForCausalLM

from alignment import KTOConfig, KTOTrainer
from alignment.data.batching import collate
from alignment.references.adapter import AdapterReference
from alignment.references.base import RowIds
from tools.ranks import RankServer

STARTS = ("new", "continued")
PLACEMENTS = ("adapter", "replica", "sharded", "offload")


def case_of(kind: str, stage: str, start: str, ranks: int = 1) -> Combination:
    """A KTO case of ``adapter_grid``."""
    case = {"method": "KTO", "kind": kind, "stage": stage, "ranks": ranks, "start": start}
    return case | {"checkpointing": "unchecked"}


@pytest.mark.parametrize(
    ("kind", "stage", "start"),
    [
        ("saved", "stage3", "new"),
        ("tied", "stage0", "continued"),
        ("qlora", "stage2", "new"),
        ("int8", "stage0", "continued"),
        ("dora", "stage0", "new"),
        pytest.param("saved", "stage3", "continued", marks=pytest.mark.ci),
        *(
            pytest.param(kind, stage, start, marks=pytest.mark.slow)
            for kind in ("lora", "qlora", "int8", "saved", "tied", "dora")
            for stage in ("stage2", "stage3-offload")
            for start in STARTS
        ),
    ],
)
def test_it_equals_a_frozen_copy(
    bases: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest, kind: str, stage: str, start: str
) -> None:
    """The copy is PEFT's model in float64, on the base as loaded; each token's log-prob matches to 1e-5."""
    run = adapter_run(case_of(kind, stage, start), bases, tmp_path, tmp_path / "starts")
    copy = dense_base(run["model"], False, BITS.get(kind))
    if start == "continued":
        copy = adapted(copy, run["args"]["adapter_name_or_path"])
    trainer = KTOTrainer(model=run["model"], args=KTOConfig(**run["args"]), train_dataset=run["train"])
    request.addfinalizer(trainer.close)
    trainer.engines.build(3)
    policy, reference = trainer.engines.policy, trainer.engines.models.reference
    assert isinstance(reference, AdapterReference)
    rows = trainer.data.train.dataset
    sequences = [(rows[number]["prompt_ids"], rows[number]["completion_ids"]) for number in range(4)]
    batch = collate(sequences, 400)
    with torch.no_grad():
        logps, mask = completion_logps(copy, sequences)
    ids = RowIds("", ())

    def policy_logps() -> Tensor:
        with policy.inference():
            return policy.forward(batch).scores

    expected = (logps * mask).sum(1)
    for trained in (False, True):
        if trained:
            trainer.train()
        assert policy.engine.module.training
        trainable = [name for name, parameter in policy.scorer.named_parameters() if parameter.requires_grad]
        tokens = reference.token_logps(batch, ids).double()
        assert float((tokens.sort().values - logps[mask == 1].sort().values).abs().max()) <= 1e-5
        assert float(((reference.sequence_logps(batch, ids) - expected) / expected).abs().max()) <= 1e-5
        assert trainable == [name for name, parameter in policy.scorer.named_parameters() if parameter.requires_grad]
        assert policy.engine.module.training
        difference = float((policy_logps() - expected).abs().max())
        assert difference > 0.5 if trained else difference < 1e-3, "the policy itself has changed"


def placed(
    bases: dict[str, str], starts: Path, folder: Path, case: Combination, placements: Sequence[str] = PLACEMENTS
) -> list[dict[str, Any]]:
    """The same run with each placement of its reference."""
    runs = []
    for placement in placements:
        run = adapter_run(case, bases, folder, starts)
        name = f"{run['name']}-{placement}"
        runs.append({**run, "name": name})
        runs[-1]["args"] |= {"ref_placement": placement, "output_dir": f"{folder}/{name}"}
    return runs


def assert_same_steps(found: Iterable[dict[str, Any]], expected: Iterable[dict[str, Any]], name: object) -> None:
    """Compare the logs of all steps of two runs."""
    one, other = ([entry for entry in log if "grad_norm" in entry] for log in (found, expected))
    for number, logs in enumerate(zip(one, other, strict=True), 1):
        assert_logged(*logs, 1e-6, f"{name} step {number}")
    assert one


def logged(run: dict[str, Any], model: Any = None, **own: Any) -> list[dict[str, Any]]:
    """The log of a run in this process, of another model if one is given."""
    args = KTOConfig(**(run["args"] | own))
    trainer = KTOTrainer(model=model or run["model"], args=args, train_dataset=run["train"])
    return train_and_close(trainer).state.log_history


def check_placements(sets: list[list[dict[str, Any]]], folder: Path, ranks: RankServer, world: int) -> None:
    """Train all runs, and compare the logs and final adapters within each set."""
    (folder / "spec.json").write_text(json.dumps([run for runs in sets for run in runs]))
    ranks.run(DRIVERS / "adapter_runs.py", folder / "spec.json", nproc=world, timeout=600)
    for runs in sets:
        logs, ends = [], []
        for run in runs:
            outcome = json.loads((folder / f"{run['name']}.json").read_text())
            logs.append(outcome["log"])
            ends.append(load_file(folder / run["name"] / "step-3" / "adapter_model.safetensors"))
        for log, end, run in zip(logs[1:], ends[1:], runs[1:]):
            assert_same_steps(log, logs[0], run["name"])
            assert distance(end, ends[0]) <= 1e-6, run["name"]
        assert all(log[1]["kl"] > 0.01 and abs(log[2]["rewards/chosen"]) > 0.01 for log in logs)


@pytest.mark.ci
def test_all_placements_give_the_same_results(
    bases: dict[str, str], starts: Path, tmp_path: Path, ranks: RankServer
) -> None:
    saved, new = case_of("saved", "stage2", "continued"), case_of("lora", "stage0", "new")
    sets = [placed(bases, starts, tmp_path, saved), placed(bases, starts, tmp_path, new, ("adapter", "replica"))]
    check_placements(sets, tmp_path, ranks, 1)


@pytest.mark.ci
def test_a_live_model_with_a_saved_head_trains_like_its_folder(
    bases: dict[str, str], starts: Path, tmp_path: Path
) -> None:
    """PEFT copied its head before the scorer was created."""
    run = adapter_run(case_of("saved", "stage0", "continued"), bases, tmp_path, starts)
    folder = run["args"].pop("adapter_name_or_path")
    live = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(run["model"]), folder, is_trainable=True)
    expected = logged(run, output_dir=str(tmp_path / "folder"), adapter_name_or_path=folder)
    assert_same_steps(logged(run, live, output_dir=str(tmp_path / "live")), expected, "live")


@pytest.mark.ci
def test_packed_weights_are_not_repacked_on_a_cpu(
    bases: dict[str, str], starts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU with AVX512-BF16 does so in a reference's first pass, in the policy's engine and in a frozen one."""
    case, logs = case_of("qlora", "stage0", "continued"), []
    for kernel, placements in ((False, ("adapter",)), (True, ("adapter", "replica"))):
        for run in placed(bases, starts, tmp_path / str(kernel), case, placements):
            with monkeypatch.context() as patched:
                patched.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda has=kernel: has)
                logs.append(logged(run))
            assert_same_steps(logs[-1], logs[0], run["name"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["stage0", "stage3"])
def test_all_placements_on_two_ranks(
    bases: dict[str, str], starts: Path, tmp_path: Path, ranks: RankServer, stage: str
) -> None:
    cases = [case_of(kind, stage, start, 2) for kind in ("saved", "qlora", "int8", "dora", "tied") for start in STARTS]
    check_placements([placed(bases, starts, tmp_path, case) for case in cases], tmp_path, ranks, 2)
