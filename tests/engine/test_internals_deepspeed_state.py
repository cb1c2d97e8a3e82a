"""Assumptions of `alignment.internals.deepspeed_state`, with real engines of every kind of wrapped optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from support.fragment_runs import Case, engine, masters, train

from alignment.checkpoint.saving import gathered_state_dict
from alignment.data.batching import collate
from alignment.internals import deepspeed_state as internals

pytestmark = pytest.mark.usefixtures("one_rank")
# Each kind of engine, and the wrapper of its optimizer.
KINDS = {
    "stage0/fp32": None,
    "stage0/bf16": "unfused",
    "stage1-fp32-accumulation/bf16": "bf16",
    **dict.fromkeys(("stage2/fp32", "stage2-bf16-masters/bf16"), "zero12"),
    **dict.fromkeys(("stage2-offload/bf16", "stage2-round-robin/fp32"), "zero12"),
    **dict.fromkeys(("stage3/fp32", "stage3-sub-groups/bf16", "stage3-offload/bf16"), "zero3"),
}


def flat_weights(policy: Any) -> dict[str, torch.Tensor]:
    return {name: weight.view(-1) for name, weight in gathered_state_dict(policy.scorer.model, keep=True).items()}


@pytest.mark.parametrize("text", KINDS)
def test_units_are_the_tensors_that_the_optimizer_updates_and_weights_follow_them(text: str, tmp_path: Path) -> None:
    """Together, their pieces cover the weights exactly once, at any offsets. The kind of engine is known."""
    policy = engine(Case.of(f"{text}/adamw_torch"), tmp_path)
    stage = int(text[5])
    assert internals.wrapper(policy.engine) == KINDS[text] and internals.zero_stage(policy.engine) == stage
    assert internals.replicates_state(policy.engine) == (stage == 0)
    train(policy, 0, 1)
    units, states = internals.state_units(policy.engine), internals.inner_optimizer(policy.engine).state
    assert {id(unit.master) for unit in units} == {id(master) for master in states} and len(units) == len(states)
    assert {unit.group for unit in units} == {0, 1}
    sizes = dict.fromkeys((id(parameter) for parameter in policy.scorer.model.parameters()), 0)
    for unit in units:
        for parameter, _, _, numel in unit.pieces:
            sizes[id(parameter)] += numel
    for parameter in policy.scorer.model.parameters():
        assert sizes[id(parameter)] == torch.Size(internals.whole_shape(parameter)).numel()
    before = flat_weights(policy)
    for name, master in masters(policy).items():
        assert torch.equal(master.to(before[name].dtype), before[name]), name
    for unit in units:
        unit.master.data.mul_(1.5)
    internals.refresh_weights(policy.engine)
    wanted = masters(policy)
    if stage == 3:  # those that DeepSpeed keeps whole on every rank, looked at before any is gathered
        small = [(name, p) for name, p in policy.scorer.model.named_parameters() if p.ds_persist]
        assert small and all(torch.equal(p.data.view(-1), wanted[name].to(p.dtype)) for name, p in small)
    for name, weight in flat_weights(policy).items():
        assert not torch.equal(weight, before[name]) and torch.equal(weight, wanted[name].to(weight.dtype)), name
    train(policy, 1, 1)
    policy.close()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("layout", ["stage0", "stage2"])
def test_a_loss_scale_continues(layout: str, again: bool, tmp_path: Path) -> None:
    """It falls at an overflow, with ZeRO at the second one, and rises after three good steps; a fresh engine does so
    at the same steps, and counts steps and samples on."""
    first, second = engine(Case(layout, "fp16"), tmp_path), engine(Case(layout, "fp16"), tmp_path)
    train(first, 0, 3)
    overflow(first)
    train(first, 3, 1)
    internals.set_loss_scale_state(second.engine, internals.loss_scale_state(first.engine))
    counted = internals.counters(first.engine)
    assert counted == {"global_steps": 5, "global_samples": 5 * 8, "micro_steps": 5, "skipped_steps": 1}
    internals.set_counters(second.engine, counted)
    counts: list[dict[str, int]] = []
    scales: list[list[float]] = [[], []]
    for policy, course in zip((first, second), scales):
        course.append(policy.engine.optimizer.loss_scale)
        if again:
            overflow(policy)
        for number in range(4):
            course.append(policy.engine.optimizer.loss_scale)
            train(policy, number, 1)
        course.append(policy.engine.optimizer.loss_scale)
        counts.append(internals.counters(policy.engine))
        policy.close()
    assert scales[0] == scales[1] and counts[0] == counts[1] != counted
    assert scales[0][0] > scales[0][1] if again else scales[0][0] == scales[0][1] < scales[0][-1]


def overflow(policy: Any) -> None:
    """A step that overflows, with DeepSpeed's update of its loss scale."""
    policy.backward(policy.forward(collate([([2, 3, 4], [5, 6])], 20)).scores.sum() * float("inf"), last=True)
    policy.step()
    policy.engine.optimizer._update_scale(True)


class Recorder:
    """Replaces compiled code and records calls with their non-tensor arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> None:
            plain = [type(value) if isinstance(value, torch.Tensor) else value for value in arguments]
            self.calls.append((name, *plain))

        return called


def test_a_replayed_step_is_called_like_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(CPUAdamBuilder, "load", lambda self: recorder)
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": decay} for decay in (0.0, 0.1)]
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, lr=1e-2, betas=(0.9, 0.97))
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(2)
    recorder.calls.clear()
    for _ in range(3):
        optimizer.step()
    real = [call[:-1] + (torch.Tensor,) if call[-1] is torch.nn.Parameter else call for call in recorder.calls]
    recorder.calls.clear()
    internals.replay_cpu_adam(optimizer, 3)
    assert recorder.calls == real and len(real) == 6
