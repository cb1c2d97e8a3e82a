"""The rehearsal before the first step: it leaves no trace, fails instead of a later step, and finds micro-batches."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import DRIVERS
from support.bad_step_runs import RESUMED, Case, differences, name_of, run_of
from support.capped_memory import capped
from support.helpers import STAGES, options, train_and_close
from support.resume_grid import make_models as resumed_models
from support.whole_runs import completions, logged, make, make_models
from transformers import TrainerCallback

from alignment import SFTConfig, SFTTrainer
from alignment.config.errors import TrainingError
from alignment.online.window import OnlineWindowPass
from alignment.rewards.reward_model import ClassifierReward
from alignment.training.sampling import EvaluationAnswers
from alignment.training.window import WindowPass
from tools.ranks import RankServer

pytestmark = pytest.mark.usefixtures("own_process_group")
REHEARSED, NOT = {"memory_rehearsal": "true"}, {"memory_rehearsal": "false"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("method", "stage"),
    [
        ("KTO", "stage3"),
        *(
            pytest.param(*case, marks=pytest.mark.ci)
            for case in [("KTO", "stage0"), ("KTO", "stage2"), ("OnlineDPO", "stage0"), ("OnlineDPO", "stage2"),
                         ("OnlineDPO", "stage3"), ("Reward", "stage2"), ("DPO", "stage3-offload")]
        ),
    ],
)  # fmt: skip
def test_one_rank_trains_as_without(
    method: str, stage: str, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, states, logs and completions are bitwise equal, also after a resume."""
    asked, scored, sampled = (
        mock.Mock(side_effect=each)
        for each in (OnlineWindowPass.answered, ClassifierReward.rehearse, EvaluationAnswers.rehearse)
    )
    monkeypatch.setattr(OnlineWindowPass, "answered", lambda *args: asked(*args))
    monkeypatch.setattr(ClassifierReward, "rehearse", lambda *args: scored(*args))
    monkeypatch.setattr(EvaluationAnswers, "rehearse", lambda *args: sampled(*args))
    rehearsed, compute = [], WindowPass.__call__

    def computed(*args: Any, **kwargs: Any) -> Any:
        rehearsed.extend([kwargs["train"]] if kwargs.get("rehearses") else [])
        return compute(*args, **kwargs)

    given = {"deepspeed": STAGES[stage], "save_strategy": "steps", "save_steps": 2, "eval_on_start": True}
    if method == "OnlineDPO":
        given["reward_model_path"] = models["classifier"]
    elif method != "Reward":
        given |= {"generate_during_eval": True, "max_new_tokens": 8}
    whole = train_and_close(make(method, models, tmp_path / "whole", **NOT, **given))
    asked_without = asked.call_count
    monkeypatch.setattr(WindowPass, "__call__", computed)
    again = train_and_close(make(method, models, tmp_path / "again", **REHEARSED, **given))
    assert rehearsed == [True, False] and asked.call_count == 2 * asked_without, "reward functions are not called"
    assert (scored.call_count, sampled.call_count) == (method == "OnlineDPO", method not in ("OnlineDPO", "Reward"))
    shutil.copytree(again.output_dir, tmp_path / "resumed" / "out")
    for name in ("checkpoint-4", "checkpoint-6"):
        shutil.rmtree(tmp_path / "resumed" / "out" / name)
    torch.manual_seed(7)
    resumed = make(method, models, tmp_path / "resumed", **REHEARSED, **given)
    train_and_close(resumed, resume_from_checkpoint="latest")
    assert rehearsed == [True, False] * 2, "each attempt begins with a rehearsal"
    for other in (again, resumed):
        assert logged(other) == logged(whole) and completions(other) == completions(whole)
        files = [path.relative_to(whole.output_dir) for path in whole.output_dir.rglob("*.safetensors")]
        assert files
        for file in files:
            assert (other.output_dir / file).read_bytes() == (whole.output_dir / file).read_bytes(), file
        states = [
            json.loads((run.output_dir / "checkpoint-6" / "run_state.json").read_text()) for run in (whole, other)
        ]
        for name in ("engine", "schedule", "data", "history", "bad_steps"):
            assert states[0][name] == states[1][name], name


TWO_RANKS: list[Case] = [
    ("stage0", "bf16", 2, "KTO", "full"),
    ("stage2", "fp32", 2, "OnlineDPO", "full"),
    ("stage2", "bf16", 2, "KTO", "lora"),
    ("stage2-offload", "fp32", 2, "CPO", "full"),
    ("stage3", "fp32", 2, "KTO", "full"),
    ("stage3-offload", "bf16", 2, "SFT", "full"),
]


@pytest.mark.slow
def test_two_ranks_train_as_without(tmp_path: Path, ranks: RankServer) -> None:
    """All runs are in one launch: without a rehearsal, with one, and resumed with one."""
    model, runs = resumed_models(tmp_path / "models")["model"], []
    for case in TWO_RANKS:
        given = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
        plain, rehearsed = (run_of(case, model, **given, **how) for how in (NOT, REHEARSED))
        rehearsed["name"] += "-with"
        resumed = {**rehearsed, "name": f"{name_of(case)}-resumed", "from": [rehearsed["name"], RESUMED]}
        runs += [plain, rehearsed, resumed]
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(runs))
    ranks.run(DRIVERS / "bad_steps.py", spec, nproc=2, timeout=120 + 20 * len(runs))
    for case in TWO_RANKS:
        whole, rehearsed, resumed = (tmp_path / f"{name_of(case)}{end}" for end in ("", "-with", "-resumed"))
        assert (name_of(case), differences(whole, rehearsed)) == (name_of(case), [])
        assert differences(whole, resumed, RESUMED + 1) == []


# Out of memory -------------------------------------------------------------------------------------------------------

ROWS = [{"prompt": "ab", "completion": "c" * (40 if 8 <= number < 10 else 4)} for number in range(16)]


class Plan:
    """A memory plan, which leaves the accumulation of gradients as it is."""

    max_tokens: int | None = None
    tokens: int | None = None
    planner = SimpleNamespace(gradients=lambda tokens: None)
    plan = SimpleNamespace(gpu={})

    def __init__(self, layers: int = 1) -> None:
        self.checkpointed_layers = layers

    def peak(self, phase: str) -> int:
        return {"train": 3 * 2**30}.get(phase, 0)

    def describe(self) -> str:
        return "memory plan: made for this test"

    def compared(self, phases: Any) -> str:
        return ""

    def changes(self) -> list[str]:
        return ["set max_tokens_per_batch to 10", "set max_length to 20", "use_peft"]


def sft(model: str, folder: Path, *callbacks: Any, **more: Any) -> SFTTrainer:
    """Return a run of four steps, of which the third has two rows that are longer than all others."""
    given = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": 1, "num_train_epochs": 1}
    given |= {"per_device_train_batch_size": 4, **more}
    args = SFTConfig(**options(folder, **given))
    return SFTTrainer(model=model, args=args, train_dataset=ROWS, callbacks=[*callbacks])


@pytest.fixture(scope="module")
def peaks(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The memory of each step of the run without a rehearsal."""
    with capped() as found:
        train_and_close(sft(models["policy"], tmp_path_factory.mktemp("peaks"), **NOT))
    assert len(found.steps) == 4 and found.steps[2] > 1.2 * max(found.steps[1], found.steps[3])
    return found.steps


def test_a_run_that_does_not_fit_ends_before_its_first_step(
    peaks: list[int], models: dict[str, str], tmp_path: Path
) -> None:
    """The message names phase, lengths, prediction, measurement and remedies, at a step as well."""
    cap = (peaks[1] + peaks[2]) / 2
    late = sft(models["policy"], tmp_path / "late", **NOT)
    said = (
        "out of memory in phase train, after step 2, 4 sequences of 42, 42, 6, 6 tokens in the micro-batch, measured "
    )
    with capped(cap), pytest.raises(TrainingError, match=f"^{said}"):
        train_and_close(late)
    early = sft(models["policy"], tmp_path / "early", **REHEARSED)
    early.context.memory_plan = Plan()
    with capped(cap), pytest.raises(TrainingError) as raised:
        train_and_close(early)
    assert (late.state.global_step, early.state.global_step) == (2, 0)
    start, measured, end = re.split(r"measured ([\d.]+ \wi?B)", str(raised.value))
    assert measured and start == (
        "out of memory in phase train, in the rehearsal before the first step, 4 sequences of 42, 42, 6, 6 tokens in "
        "the micro-batch, predicted 3.00 GiB, "
    )
    assert end.startswith(
        " before it failed. What uses less memory: (1) set max_tokens_per_batch to 10; (2) set max_length to 20; (3) "
        "use_peft (CUDA out of memory."
    )


@pytest.mark.parametrize("stage", ["stage0", pytest.param("stage2", marks=pytest.mark.ci), "stage3"])
def test_a_smaller_micro_batch_is_found(
    stage: str, models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The updates are those of the whole micro-batches, and a resume keeps the limit."""
    given = {"deepspeed": STAGES[stage], "save_strategy": "steps", "save_steps": 2, "auto_find_batch_size": True}
    with capped() as uncapped:
        whole = train_and_close(sft(models["policy"], tmp_path / "whole", **given, **REHEARSED), save=True)
    assert "auto_find_batch_size" not in capsys.readouterr().out
    assert uncapped.rehearsal == pytest.approx(max(uncapped.steps), rel=0.002), "no less and no more than a step"
    found = sft(models["policy"], tmp_path / "found", **given, **REHEARSED)
    with capped((2 * uncapped.steps[2] + uncapped.steps[1]) / 3):
        train_and_close(found, save=True)
    tokens = found.data.max_tokens
    assert tokens is not None and f"micro-batches of at most {tokens} tokens fit" in capsys.readouterr().out
    for one, other in zip(logged(whole), logged(found), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    shutil.copytree(found.output_dir, tmp_path / "resumed" / "out")
    shutil.rmtree(tmp_path / "resumed" / "out" / "checkpoint-4")
    resumed = sft(models["policy"], tmp_path / "resumed", **given, **REHEARSED)
    train_and_close(resumed, save=True, resume_from_checkpoint="latest")
    assert resumed.data.max_tokens == tokens
    file = "model.safetensors"
    assert (resumed.output_dir / file).read_bytes() == (found.output_dir / file).read_bytes()


def test_several_ranks_take_the_split_of_the_plan(
    models: dict[str, str], tmp_path: Path, peaks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And end with its advice if that does not fit: a rank cannot try again while the others wait."""
    monkeypatch.setattr("alignment.training.rehearsal.world_size", lambda: 2)
    for cap in (peaks[2], peaks[0] * 0.75):
        run = sft(models["policy"], tmp_path / str(cap), auto_find_batch_size=True, **REHEARSED)
        run.context.memory_plan = plan = Plan()
        plan.max_tokens = 60
        fails = pytest.raises(TrainingError, match="1 sequence of 42 .* set max_tokens_per_batch to 10")
        with capped(cap), contextlib.nullcontext() if cap == peaks[2] else fails:
            train_and_close(run)
        assert run.data.max_tokens == 60


@pytest.mark.parametrize("stage", ["stage2", pytest.param("stage3", marks=pytest.mark.ci)])
def test_the_memory_of_several_micro_batches(stage: str, models: dict[str, str], tmp_path: Path) -> None:
    given = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "deepspeed": STAGES[stage]}
    with capped() as used:
        train_and_close(sft(models["policy"], tmp_path, **given, **REHEARSED))
    assert used.rehearsal == pytest.approx(max(used.steps), rel=0.01)


def test_a_single_row_is_not_split(models: dict[str, str], tmp_path: Path, peaks: list[int]) -> None:
    run = sft(models["policy"], tmp_path, auto_find_batch_size=True, **REHEARSED)
    with (
        capped(peaks[0] * 0.75),
        pytest.raises(TrainingError, match="train, in the rehearsal .* 1 sequence of 42 tok"),
    ):
        train_and_close(run)


# Gradient checkpointing ----------------------------------------------------------------------------------------------


class Counting(TrainerCallback):
    """Counts the calls of each layer's MLP, which a recomputation doubles."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if not self.calls:
            layers = [module for name, module in model.named_modules() if re.search(r"layers\.\d+\.mlp$", name)]
            self.calls = [0] * len(layers)
            for number, layer in enumerate(layers):
                layer.register_forward_pre_hook(functools.partial(self.count, number))

    def count(self, number: int, *_: Any) -> None:
        self.calls[number] += 1


OFTEN = ("stage2", "lora-stage3-reentrant")  # in the default tests
CHECKPOINTED = {
    "stage0": {"deepspeed": STAGES["stage0"]},
    "stage2": {"deepspeed": STAGES["stage2"]},
    "stage3": {"deepspeed": STAGES["stage3"]},
    "lora": {"deepspeed": STAGES["stage2"], "use_peft": True, "lora_dropout": 0.0},
    "reentrant": {"deepspeed": STAGES["stage2"], "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "lora-stage3-reentrant": {
        "deepspeed": STAGES["stage3"], "use_peft": True, "lora_dropout": 0.0,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.ci) for kind in CHECKPOINTED]
)
def test_any_number_of_layers_is_recomputed(
    kind: str, models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results are equal; all layers are recomputed without a plan."""
    given, results = {"max_steps": 2, "save_strategy": "steps", **CHECKPOINTED[kind]}, {}
    for layers in (None, 0, 1):
        counting = Counting()
        trainer = sft(models["policy"], tmp_path / str(layers), counting, **given)
        trainer.context.memory_plan = None if layers is None else Plan(layers)
        train_and_close(trainer)
        assert counting.calls == [4 if layers is None or number < layers else 2 for number in range(2)]
        line = f"gradient checkpointing: {layers} of 2 layers"
        assert (line in capsys.readouterr().out) is (layers is not None)
        (file,) = (trainer.output_dir / "checkpoint-2").glob("*model.safetensors")
        results[layers] = (logged(trainer), file.read_bytes())
    assert results[None] == results[0] == results[1]


def test_a_resume_keeps_the_number_of_layers(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the options say otherwise; then it says so."""
    given = {"save_strategy": "steps", "save_steps": 2}
    for number, (asked, layers, line) in enumerate(
        [
            ("auto", 1, None),
            ("auto", 0, "gradient checkpointing: 1 of 2 layers, as in the run that is resumed"),
            (False, 2, "gradient checkpointing: 0 layers instead of 1 in the run that is resumed"),
        ]
    ):
        counting = Counting()
        folder = tmp_path / str(number)
        if number:
            shutil.copytree(tmp_path / "0" / "out", folder / "out")
            shutil.rmtree(folder / "out" / "checkpoint-4")
        trainer = sft(models["policy"], folder, counting, gradient_checkpointing=asked, **given)
        trainer.context.memory_plan = Plan(layers)
        train_and_close(trainer, resume_from_checkpoint="latest" if number else None)
        steps = 2 if number else 4
        assert counting.calls == ([2 * steps, steps] if asked == "auto" else [steps, steps])
        assert line is None or line in capsys.readouterr().out
