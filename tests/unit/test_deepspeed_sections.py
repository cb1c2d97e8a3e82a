"""The sections ``optimizer`` and ``scheduler`` of a DeepSpeed JSON agree with the options, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR

from alignment.config.deepspeed import LoadedConfig
from alignment.config.elsewhere import without_sections
from alignment.config.errors import OptionError
from alignment.engines.optimizers import build_optimizer, build_scheduler
from alignment.methods.cpo_options import CPOConfig

ADAMW = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}


def optimizer(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, "optimizer": {"type": kind, "params": {"lr": "auto", **parameters}}}


def scheduler(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, "scheduler": {"type": kind, "params": {**WARMUP, **parameters}}}


@pytest.mark.parametrize(
    ("base", "given"),
    [
        (optimizer("AdamW", **ADAMW), {"learning_rate": 3e-5}),
        (
            optimizer("adam", lr=3e-5, betas=[0.8, 0.99], eps=1e-6, weight_decay=0.1),
            {"learning_rate": 3e-5, "adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6, "weight_decay": 0.1},
        ),
        (optimizer("AdamW", betas=(0.9, 0.999)), {"optim": "deepspeed_cpu_adam"}),
        (optimizer("FusedAdam"), {"optim": "deepspeed_fused_adam"}),
        (optimizer("SGD", momentum=0.9), {"optim": "sgd", "optim_args": "momentum=0.9"}),
        (scheduler("WarmupLR"), {"lr_scheduler_type": "constant_with_warmup"}),
        (
            scheduler("WarmupLR", warmup_num_steps=4),
            {
                "lr_scheduler_type": "constant_with_warmup",
                "warmup_steps": 4,
                "lr_scheduler_kwargs": {"warmup_type": "log"},
            },
        ),
        (
            scheduler("WarmupDecayLR", warmup_type="linear", warmup_max_lr=1e-3, total_num_steps=9),
            {"lr_scheduler_type": "linear", "max_steps": 9, "warmup_ratio": 0.1, "learning_rate": 1e-3},
        ),
    ],
)
def test_sections_that_agree_with_the_options(base: dict[str, Any], given: dict[str, Any]) -> None:
    options = CPOConfig("out", deepspeed=base, **given)
    assert {name: getattr(options, name) for name in given if name != "optim_args"}.items() <= given.items()


@pytest.mark.parametrize(
    ("base", "given", "said", "option"),
    [
        (optimizer("AdamW", lr=1e-4), {}, "optimizer.params.lr=0.0001", "learning_rate"),
        (optimizer("AdamW", betas=[0.9, 0.95]), {}, "params.betas=", "adam_beta1 and adam_beta2"),
        (optimizer("AdamW"), {"optim": "sgd"}, "optimizer.type='AdamW'", "optim"),
        (optimizer("OneBitAdam"), {}, "optimizer.type='OneBitAdam'", "optim"),
        (optimizer("AdamW", torch_adam=True), {}, "params.torch_adam=True", "optim_args"),
        ({"optimizer": {"type": "AdamW"}}, {}, "optimizer.params.lr=None", "learning_rate"),
        (scheduler("WarmupLR"), {}, "type='WarmupLR'", "lr_scheduler_type"),
        (scheduler("WarmupDecayLR", total_num_steps=9), {"max_steps": 8}, "total_num_steps=9", "max_steps"),
        (scheduler("WarmupDecayLR", warmup_min_lr=1e-7), {}, "warmup_min_lr=1e-07", "lr_scheduler_kwargs"),
        (scheduler("WarmupDecayLR"), {"warmup_steps": 3}, "warmup_type='log'", "lr_scheduler_kwargs"),
    ],
)
def test_sections_that_differ_from_the_options(
    base: dict[str, Any], given: dict[str, Any], said: str, option: str
) -> None:
    with pytest.raises(OptionError) as caught:
        CPOConfig("out", **{"lr_scheduler_type": "linear", **given}, deepspeed=base)
    assert "DeepSpeed mapping: " in str(caught.value) and said in str(caught.value)
    assert f"does not agree with the option {option}, which gives" in str(caught.value)


def test_a_section_that_is_no_mapping() -> None:
    with pytest.raises(OptionError, match="optimizer='AdamW': expected a mapping"):
        CPOConfig("out", deepspeed={"optimizer": "AdamW"})


def test_sections_set_after_construction() -> None:
    base = optimizer("SGD")
    options = CPOConfig("out")
    options.deepspeed = base
    with pytest.raises(OptionError, match=r"optimizer.type='SGD' does not agree with the option optim"):
        options.sealed()
    assert without_sections(LoadedConfig(base, "x")) == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize(("kind", "theirs"), [("WarmupLR", WarmupLR), ("WarmupDecayLR", WarmupDecayLR)])
def test_learning_rates_match_deepspeed(kind: str, theirs: type, warmup_type: str) -> None:
    """DeepSpeed's are a step late: its schedules return 0 again after the first step."""
    length: dict[str, Any] = {"total_num_steps": "auto"} if kind == "WarmupDecayLR" else {}
    base = scheduler(kind, warmup_num_steps=4, warmup_max_lr=8.0, warmup_type=warmup_type, **length)
    ours = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=8.0)
    same = {
        "lr_scheduler_type": "linear" if length else "constant_with_warmup",
        "learning_rate": 8.0,
        "warmup_steps": 4,
    }
    shape = {"warmup_type": "log"} if warmup_type == "log" else None
    options = CPOConfig("out", deepspeed=base, max_steps=10, lr_scheduler_kwargs=shape, **same)
    schedule = build_scheduler(ours, options, 10)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=8.0)
    length = {"total_num_steps": 10} if length else {}
    reference = theirs(other, warmup_max_lr=8.0, warmup_num_steps=4, warmup_type=warmup_type, **length)
    for _ in range(11):
        ours.step()
        reference.step()
        assert schedule.get_last_lr() == pytest.approx(reference.get_last_lr(), rel=1e-12)
        schedule.step()


@pytest.mark.parametrize(("base", "decays"), [(optimizer("SGD"), [0.1, 0.1]), (None, [0.1, 0.0])])
def test_weight_decay_with_a_section_applies_to_biases_and_norms(
    base: dict[str, Any] | None, decays: list[float]
) -> None:
    options = CPOConfig("out", optim="sgd", weight_decay=0.1, deepspeed=base)
    made = build_optimizer(torch.nn.Linear(2, 2), options)
    assert [group["weight_decay"] for group in made.param_groups] == decays


def test_sections_are_not_passed_to_deepspeed() -> None:
    """With them, DeepSpeed would build its own optimizer and schedule."""
    from support.helpers import tiny_config

    from alignment.models.source import ModelSource
    from alignment.planning.engines import plan_engines

    base = {**optimizer("AdamW", **ADAMW), **scheduler("WarmupLR")}
    options = CPOConfig("out", deepspeed=base, use_cpu=True, lr_scheduler_type="constant_with_warmup")
    plan = plan_engines(options, ModelSource("model", None, tiny_config("tied"), {}), None)
    assert plan.policy["zero_optimization"]["stage"] == 2
    assert {"optimizer", "scheduler"}.isdisjoint(plan.policy)
