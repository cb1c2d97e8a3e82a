"""The memory plan of a run: printed at its start, compared at its end, and decisive for gradient checkpointing."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.helpers import make_model, options, train_and_close, unpaired_rows, zero

from alignment import KTOConfig, KTOTrainer
from alignment.config.dtypes import Machine, planning_for
from alignment.models.tiled_mlp import is_tiled
from alignment.planning import engines, placing
from alignment.planning.gpu_terms import CONTEXT, usable_bytes
from alignment.planning.phases import Phases
from alignment.planning.plan import Frozen, MemoryPlan
from alignment.references.engine import EngineReference
from alignment.training import memory_plan

pytestmark = pytest.mark.usefixtures("own_process_group")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), layers=4)


def trainer(folder: Path, model: str, **more: Any) -> KTOTrainer:
    args = options(
        folder,
        max_length=64,
        gradient_checkpointing="auto",
        deepspeed=zero(2),
        **{"ref_placement": "replica", "max_steps": 1, **more},
    )
    return KTOTrainer(model=model, args=KTOConfig(**args), train_dataset=unpaired_rows(8))


def with_card(monkeypatch: pytest.MonkeyPatch, card: float) -> None:
    """Let a run on a CPU be planned for a GPU."""
    for module in (engines, memory_plan):
        monkeypatch.setattr(module, "smallest_card", lambda: card)


def test_a_run_says_what_it_needs_and_what_it_used(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_card(monkeypatch, 24e9)
    run = trainer(tmp_path, model, save_strategy="steps", save_steps=1)
    assert run.context.memory_plan is not None
    plan = run.context.memory_plan.plan
    assert {"load", "reference", "train", "step", "save", "evaluate"} == plan.gpu.keys()
    train_and_close(run)
    said = capsys.readouterr().out
    assert "memory plan: fits: " in said and "gradient checkpointing: 0 of 4 layers" in said
    events = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    predicted = next(event for event in events if event.get("event") == "end")["predicted_bytes"]
    assert predicted == {phase: plan.peak(phase) for phase in plan.gpu}
    compared = f"predicted and measured: .*train {predicted['train'] / 1e9:.2f} and "
    report = tmp_path / "out" / "report.md"
    assert re.search(compared, report.read_text()) and re.search(compared, said)
    report.unlink()
    train_and_close(trainer(tmp_path, model, save_strategy="steps", max_steps=2), resume_from_checkpoint="latest")
    assert re.search(compared, report.read_text()) and re.search(compared, capsys.readouterr().out), "after a resume"


def test_as_few_layers_are_recomputed_as_must_be(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that just holds the run with two recomputed layers does not hold it with one."""
    with_card(monkeypatch, 24e9)
    run = trainer(tmp_path / "a", model).context.memory_plan
    assert run is not None
    peaks = [run.planner.plan(run.tokens, layers).peak(reserve=True) for layers in range(5)]
    assert peaks == sorted(peaks, reverse=True) and peaks[2] < peaks[1]
    with_card(monkeypatch, peaks[2])
    fewer = trainer(tmp_path / "b", model).context.memory_plan
    assert fewer is not None and fewer.checkpointed_layers == 2 and fewer.fits
    with_card(monkeypatch, peaks[2] - 1)
    more = trainer(tmp_path / "c", model).context.memory_plan
    assert more is not None and more.checkpointed_layers == 3


@pytest.mark.ci
def test_a_reference_scores_as_many_micro_batches_as_other_phases_need_memory(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run computes as before, even if its plan now says otherwise. A replica has nothing to transfer."""
    with_card(monkeypatch, 24e9)
    more = {"ref_placement": "offload", "gradient_accumulation_steps": 4, "save_strategy": "steps", "save_steps": 1}
    run = trainer(tmp_path / "a", model, **more)
    assert run.context.memory_plan is not None
    plan = run.context.memory_plan.plan

    def planned(**others: Any) -> MemoryPlan:
        args = KTOConfig(**options(tmp_path, **more | {"max_length": 64} | others))
        return replace(run.context.memory_plan, options=args, engines=None).plan  # type: ignore[type-var]

    many = planned(gradient_accumulation_steps=256)
    assert 1 < plan.together <= 4 < many.together < 256
    assert planned(ref_placement="replica").together == planned(gradient_accumulation_steps=1).together == 1
    with monkeypatch.context() as patched:
        patched.setattr(Phases, "_together", lambda *_: 1)
        alone = planned(gradient_accumulation_steps=256)
    assert alone.peak() == many.peak()
    single, several, peak = (size - CONTEXT for size in (alone.peak("reference"), many.peak("reference"), many.peak()))
    assert single < 0.8 * peak < several <= peak
    asked: list[int] = []
    of_each = EngineReference.logps_of_each

    def counted(self: EngineReference, batches: Any, *, tokens: bool) -> Any:
        asked.append(len(batches))
        return of_each(self, batches, tokens=tokens)

    monkeypatch.setattr(EngineReference, "logps_of_each", counted)
    train_and_close(run)
    assert sum(asked) == 4 and max(asked) == plan.together
    assert f"reference: {plan.together} micro-batches in a forward pass" in capsys.readouterr().out
    asked.clear()
    monkeypatch.setattr(Phases, "_together", lambda *_: 1)
    again = trainer(tmp_path / "b", model, **more | {"max_steps": 2})
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "out" / "checkpoint-1"))
    again.close()
    assert sum(asked) == 4 and max(asked) == plan.together
    assert f"reference: {plan.together} micro-batches in a forward pass" in capsys.readouterr().out


@pytest.mark.ci
def test_a_run_that_does_not_fit_names_changes(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_card(monkeypatch, 24e9)
    run = trainer(tmp_path / "a", model, per_device_train_batch_size=8).context.memory_plan
    assert run is not None
    least = run.planner.plan(run.tokens, 4).peak(reserve=True)
    with_card(monkeypatch, least - 1)
    warned = trainer(tmp_path / "b", model, per_device_train_batch_size=8, tiled_mlp=False)
    found = warned.context.memory_plan
    assert found is not None and not found.fits and found.max_tokens is not None
    assert {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16} in [
        dict(change.options) for change in found.sufficient_changes
    ]
    train_and_close(warned)
    assert "warning: memory plan: does not fit: " in capsys.readouterr().out


def test_mlps_are_computed_in_slices_if_the_run_does_not_fit_otherwise(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_card(monkeypatch, 24e9)
    run = trainer(tmp_path / "a", model, per_device_train_batch_size=8).context.memory_plan
    assert run is not None and run.mlp is None and run.tiled.plan.checkpointed == 0
    whole, slices = (one.planner.plan(run.tokens, 4).peak(reserve=True) for one in (run, run.tiled))
    assert slices < whole
    with_card(monkeypatch, slices)
    sliced = trainer(tmp_path / "b", model, per_device_train_batch_size=8)
    assert (found := sliced.context.memory_plan) is not None and found.fits and found.mlp == "mlp"
    with contextlib.closing(sliced):
        sliced.train()
        assert sum(map(is_tiled, sliced.model.modules())) == 4
    assert "tiled_mlp: auto computes MLPs in slices" in capsys.readouterr().out


@pytest.mark.ci
def test_slices_are_offered_if_the_options_say_no(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_card(monkeypatch, 24e9)
    run = trainer(tmp_path / "a", model, per_device_train_batch_size=8, tiled_mlp=True).context.memory_plan
    assert run is not None
    with_card(monkeypatch, run.planner.plan(run.tokens, 4).peak(reserve=True))
    whole = trainer(tmp_path / "b", model, per_device_train_batch_size=8, tiled_mlp=False).context.memory_plan
    assert whole is not None and not whole.fits
    assert {"tiled_mlp": True} in [dict(change.options) for change in whole.sufficient_changes]


@pytest.mark.ci
def test_changes_are_planned_without_the_other_ranks(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is out of memory plans them alone; adapters that a script has configured stay."""
    with_card(monkeypatch, 24e9)
    args = options(tmp_path, max_length=64, max_steps=1, per_device_train_batch_size=8, learning_rate=1e-5)
    run = KTOTrainer(
        model=model,
        args=KTOConfig(**args),
        train_dataset=unpaired_rows(8),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    ).context.memory_plan
    assert run is not None

    def collective(*_: object) -> None:
        raise AssertionError("other ranks do not take part")

    monkeypatch.setattr(engines, "smallest_card", placing.smallest_card)
    monkeypatch.setattr(placing, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(placing, "largest_numbers", collective)
    assert run.changes() and run.planner.engines.adapters is not None
    fewer = run._with({"per_device_train_batch_size": 1})
    adapters = fewer.planner.engines.adapters
    assert adapters is not None and adapters.config.r == 4 and fewer.peak("train") < run.peak("train")


def test_the_largest_reward_model_counts(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_card(monkeypatch, 24e9)
    plan = trainer(tmp_path, model).context.memory_plan
    assert plan is not None
    source = plan.planner.engines.source
    small, large = (Frozen("reward model", source, "replica", "score", rows) for rows in (1, 64))
    peaks = [replace(plan.planner, rewards=each).plan().peak("score") for each in ((small, large), (large, small))]
    assert peaks[0] == peaks[1] > replace(plan.planner, rewards=(small, small)).plan().peak("score")


def test_the_longest_sequences_that_fit(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they are those that the search begins with."""
    with_card(monkeypatch, 24e9)
    run = trainer(tmp_path, model).context.memory_plan
    assert run is not None
    planner = run.planner
    planner.engines.source.config.max_position_embeddings = 2**20
    for tokens in (1024, 4096, 10_048):
        card = planner.plan(tokens, 4).peak(reserve=True)
        assert 0.95 * tokens <= planner.longest_that_fits(card, checkpointed=4) <= tokens
    vars(planner.options)["activation_offloading"] = True
    memory = planner.plan(10_048, 4).host_peak()  # the host limits them
    assert 0.95 * 10_048 <= planner.longest_that_fits(24e9, memory, checkpointed=4) <= 10_048
    assert planner.longest_that_fits(CONTEXT, checkpointed=4) == 0


def test_a_dry_run_for_another_machine_prints_the_plan(model: str, tmp_path: Path) -> None:
    from alignment.cli.dry_run import dry_run_lines

    with planning_for(Machine(2, cuda=True, card=usable_bytes(8))):
        planned = trainer(tmp_path, model, use_cpu=False)
        lines = "\n".join(dry_run_lines(planned))
    assert "GPU memory, GB" in lines and "fits: " in lines and f"{CONTEXT / 1e9:.2f}" in lines
