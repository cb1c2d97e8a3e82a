"""fp16: the gradients that the optimizer receives, and windows that are recomputed after an overflow."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.bad_step_runs import events
from support.fragment_runs import Case, differences, engine, train
from support.helpers import STAGES, options, paired_rows
from torch import Tensor
from torch.optim import AdamW
from transformers import TrainerCallback

from alignment import CPOConfig, CPOTrainer, OnlineDPOConfig, OnlineDPOTrainer
from alignment.config.errors import TrainingError
from alignment.engines.scoring import PolicyEngine
from alignment.internals.deepspeed_state import inner_optimizer, state_units, wrapper
from alignment.rollout.engine import RolloutEngine

pytestmark = pytest.mark.usefixtures("one_rank")
STEPS = 5  # the loss scale grows at the fourth
Received = list[dict[str, Tensor]]


def received(case: Case, out: Path) -> tuple[Received, list[float], PolicyEngine]:
    """The inner optimizer's input at each step, by parameter and without padding; norms; the engine."""
    policy, found = engine(case, out), Received()
    names = {parameter: name for name, parameter in policy.scorer.named_parameters()}

    def note(optimizer: Any, *_: Any) -> None:
        step: dict[str, Tensor] = {}
        for unit in state_units(policy.engine):
            if unit.master.grad is not None:
                for parameter, _, offset, numel in unit.pieces:
                    step[names[parameter]] = unit.master.grad.reshape(-1)[offset : offset + numel].float().clone()
        found.append(step)

    inner_optimizer(policy.engine).register_step_pre_hook(note)
    return found, train(policy, 0, STEPS), policy


def merged(found: Received) -> Received:
    """One mapping per step: stage 3 updates one sub-group at a time."""
    parts = len(found) // STEPS
    return [{k: v for part in found[n * parts : (n + 1) * parts] for k, v in part.items()} for n in range(STEPS)]


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory: pytest.TempPathFactory) -> tuple[Received, list[float]]:
    found, norms, policy = received(Case("stage2", "fp32"), tmp_path_factory.mktemp("fp32"))
    policy.close()
    return merged(found), norms


@pytest.mark.parametrize("layout", ["stage0", "stage0-fused", "stage1", "stage2", "stage2-offload", "stage3"])
def test_the_optimizer_receives_the_gradient_of_fp32(
    layout: str, in_fp32: tuple[Received, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the step at which the loss scale grows; clipped by the same norm, which is logged."""
    if layout == "stage0-fused":  # the wrapper of DeepSpeed's compiled optimizer, around torch's
        monkeypatch.setattr("deepspeed.runtime.engine.FusedAdam", AdamW)
    found, norms, policy = received(Case(layout.removesuffix("-fused"), "fp16"), tmp_path)
    assert wrapper(policy.engine) == {"0": "unfused", "1": "zero12", "2": "zero12", "3": "zero3"}[layout[5]] or (
        layout == "stage0-fused" and wrapper(policy.engine) == "fused"
    )
    assert policy.loss_scale == 2**13, "it has grown once"
    policy.close()
    assert norms == pytest.approx(in_fp32[1], rel=2e-2)
    for step, wanted in zip(merged(found), in_fp32[0], strict=True):
        assert step.keys() == wanted.keys()
        off, size = (
            sum(float(x.square().sum()) for x in each)
            for each in ([step[name] - wanted[name] for name in wanted], list(wanted.values()))
        )
        assert off < (2e-2) ** 2 * size


class Heard(TrainerCallback):
    """The number of calls of each event of an update."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        for event in ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"):
            setattr(self, event, lambda *_, event=event, **__: self.counts.update([event]))


def trainer_of(
    model: str, folder: Path, stage: str, power: int, heard: Heard | None = None, **more: Any
) -> CPOTrainer:
    """A run of 3 steps with dropout and an initial loss scale of ``2**power``."""
    scaling = {"initial_scale_power": power, "loss_scale_window": 1000, "hysteresis": 2, **more.pop("scaling", {})}
    given: dict[str, Any] = {
        "fp16": True,
        "max_steps": 3,
        "use_peft": True,
        "lora_dropout": 0.2,
        "disable_dropout": False,
        "deepspeed": {**STAGES[stage], "fp16": scaling},
        **more,
    }
    args = CPOConfig(**options(folder, **given))
    return CPOTrainer(model=model, args=args, train_dataset=paired_rows(16), callbacks=[heard] if heard else [])


Outcome = tuple[list[dict[str, Any]], dict[str, Tensor], float]


def outcome(trainer: CPOTrainer) -> Outcome:
    """The log, the trained weights, and the loss scale at the end."""
    with contextlib.closing(trainer):
        trainer.train()
        policy = trainer.engines.policy
        weights = {n: p.detach().clone() for n, p in policy.scorer.named_parameters() if p.requires_grad and p.numel()}
        return [line for line in trainer.state.log_history if "grad_norm" in line], weights, policy.loss_scale


TIMELESS = {"overflows", "train_runtime", "step_time"}


@pytest.mark.parametrize(
    "stage", ["stage2", *(pytest.param(s, marks=pytest.mark.ci) for s in ("stage0", "stage3", "stage2-offload"))]
)
def test_a_window_that_overflows_is_recomputed(stage: str, model: str, tmp_path: Path) -> None:
    """The run is bitwise equal to one that starts at the scale that this one reached: nothing was counted twice."""
    high, low = Heard(), Heard()
    found, weights, scale = outcome(trainer_of(model, tmp_path / "high", stage, 32, high))
    power = scale.as_integer_ratio()[0].bit_length() - 1
    wanted, others, _ = outcome(trainer_of(model, tmp_path / "low", stage, power, low))
    assert power < 32 and found[-1]["overflows"] == 32 - power
    assert differences(weights, others) == []
    assert [{k: v for k, v in line.items() if k not in TIMELESS} for line in found] == [
        {k: v for k, v in line.items() if k not in TIMELESS} for line in wanted
    ]
    assert all(line["grad_norm"] for line in found) and "overflows" not in wanted[-1]
    assert high.counts == low.counts == {"on_substep_end": 3, "on_pre_optimizer_step": 3, "on_optimizer_step": 3}
    lowered = events(tmp_path / "high", "overflow")
    assert [(e["loss_scale"], e["lowered_to"]) for e in lowered] == [
        (2.0 ** (32 - n), 2.0 ** (31 - n)) for n in range(32 - power)
    ], "at each the scale falls by half, whatever the hysteresis: the same window would overflow again"
    rates = [line["learning_rate"] for line in found]
    assert len(rates) == 3 and [line["step"] for line in found] == [1, 2, 3]


@pytest.mark.ci
@pytest.mark.parametrize("scaling", [{"min_loss_scale": 2.0**31}, {"loss_scale": 2.0**31}], ids=["minimum", "static"])
def test_a_scale_that_cannot_be_lowered_ends_the_run(scaling: dict[str, Any], model: str, tmp_path: Path) -> None:
    trainer = trainer_of(model, tmp_path, "stage2", 32, scaling=scaling)
    with contextlib.closing(trainer), pytest.raises(TrainingError, match="step 1: the gradient overflows in fp16"):
        trainer.train()
    assert len(events(tmp_path, "overflow")) == (1 if "min_loss_scale" in scaling else 0)


@pytest.mark.ci
def test_such_a_step_is_a_bad_step(model: str, tmp_path: Path) -> None:
    """``on_bad_step`` applies, as to every other step."""
    trainer = trainer_of(model, tmp_path, "stage2", 32, scaling={"loss_scale": 2.0**31}, on_bad_step="skip")
    lines, weights, _ = outcome(trainer)
    assert [line["kind"] for line in events(tmp_path, "bad_step")] == ["fp16 overflow"] * 3
    assert lines[-1]["bad_steps"] == 3 and lines[-1]["overflows"] == 3
    assert all((w == 0).all() for name, w in weights.items() if "lora_B" in name), "no weight has changed"


@pytest.mark.ci
def test_completions_are_kept(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate: Callable[..., Any] = RolloutEngine.generate
    calls: list[int] = []

    def counted(self: RolloutEngine, request: Any) -> Any:
        calls.append(len(request.prompts))
        return generate(self, request)

    monkeypatch.setattr(RolloutEngine, "generate", counted)
    stage = {**STAGES["stage2"], "fp16": {"initial_scale_power": 32, "hysteresis": 1}}
    given = options(tmp_path, fp16=True, max_steps=2, max_new_tokens=4, deepspeed=stage)
    args = OnlineDPOConfig(**{k: v for k, v in given.items() if k != "max_prompt_length"})
    rows = [{"prompt": row["prompt"]} for row in paired_rows(8)]

    def lengths(completions: list[str]) -> list[float]:
        return [len(set(text)) + len(text) / 7 for text in completions]

    trainer = OnlineDPOTrainer(model=model, args=args, train_dataset=rows, reward_funcs=lengths)
    with contextlib.closing(trainer):
        trainer.train()
        lines = [line for line in trainer.state.log_history if "overflows" in line]
    assert lines and lines[-1]["overflows"] > 1
    assert len(calls) == 2
