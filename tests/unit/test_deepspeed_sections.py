"""The sections ``optimizer`` and ``scheduler`` of a DeepSpeed JSON: the options they set, and contradictions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR

from alignment.config.deepspeed import LoadedConfig
from alignment.config.errors import OptionError
from alignment.config.translated.sections import notes, without_sections
from alignment.engines.optimizers import build_optimizer, build_scheduler
from alignment.methods.cpo_options import CPOConfig

ADAMW = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}


def optimizer(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, "optimizer": {"type": kind, "params": {"lr": "auto", **parameters}}}


def scheduler(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2}, "scheduler": {"type": kind, "params": {**WARMUP, **parameters}}}


@pytest.mark.parametrize(
    ("base", "given", "expected"),
    [
        (optimizer("AdamW", **ADAMW), {"learning_rate": 3e-5}, {"learning_rate": 3e-5, "optim": "adamw_torch"}),
        (
            optimizer("adam", lr=3e-5, betas=[0.8, 0.99], eps=1e-6, weight_decay=0.1, torch_adam=True),
            {"adam_beta2": 0.99},
            {"learning_rate": 3e-5, "adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6, "weight_decay": 0.1},
        ),
        (optimizer("AdamW"), {"optim": "deepspeed_cpu_adam"}, {"optim": "deepspeed_cpu_adam"}),
        (optimizer("Lion", betas=[0.8, 0.99]), {}, {"optim": "lion_32bit", "adam_beta1": 0.8, "adam_beta2": 0.99}),
        (optimizer("RMSprop", alpha=0.5), {}, {"optim": "rmsprop", "optim_args": {"alpha": 0.5}}),
        (optimizer("FusedAdam"), {}, {"optim": "deepspeed_fused_adam"}),
        (optimizer("Adam", adam_w_mode=False), {}, {"optim": "adamw_torch"}),
        (optimizer("AdamW", amsgrad=True), {}, {"optim_args": {"amsgrad": True}}),
        (
            optimizer("SGD", momentum=0.9),
            {"optim_args": "nesterov=true"},
            {"optim": "sgd", "optim_args": {"nesterov": True, "momentum": 0.9}},
        ),
        (
            scheduler("WarmupLR"),
            {"warmup_ratio": 0.1},
            {"lr_scheduler_type": "constant_with_warmup", "lr_scheduler_kwargs": {"warmup_type": "log"}},
        ),
        (scheduler("WarmupLR"), {}, {"lr_scheduler_type": "constant_with_warmup", "lr_scheduler_kwargs": None}),
        (
            scheduler(
                "WarmupDecayLR", warmup_type="linear", warmup_num_steps=1, warmup_max_lr=1e-3, total_num_steps=9
            ),
            {"max_steps": 9},
            {"lr_scheduler_type": "linear", "warmup_steps": 2, "learning_rate": 1e-3, "lr_scheduler_kwargs": None},
        ),
    ],
)
def test_options_set_by_the_sections(base: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]) -> None:
    options = CPOConfig("out", deepspeed=base, **given)
    assert {name: getattr(options, name) for name in expected} == expected
    before = copy.deepcopy(options.to_dict())
    options.__post_init__()
    assert options.to_dict() == before


@pytest.mark.parametrize(
    ("base", "given", "said"),
    [
        (optimizer("AdamW", lr=1e-4), {"learning_rate": 3e-5}, ["optimizer.params.lr=0.0001", "learning_rate=3e-05"]),
        (optimizer("AdamW", betas=[0.9, 0.95]), {"adam_beta2": 0.99}, ["params.betas=0.95", "adam_beta2=0.99"]),
        (optimizer("AdamW"), {"optim": "sgd"}, ["optimizer.type='AdamW'", "optim='sgd'"]),
        (optimizer("AdamW"), {"optim": "adamw_8bit"}, ["optimizer.type='AdamW'", "optim='adamw_8bit'"]),
        (optimizer("OneBitAdam"), {}, ["optimizer.type='OneBitAdam'", "AdamW, Adam, Lion, RMSprop, SGD"]),
        (optimizer("Lion"), {"optim": "lion_8bit"}, ["optimizer.type='Lion'", "optim='lion_8bit'"]),
        (optimizer("Adam", adam_w_mode=False), {"weight_decay": 0.1}, ["adam_w_mode=False", "weight_decay=0.1"]),
        (optimizer("AdamW", bias_correction=False), {}, ["params.bias_correction=False", "not supported"]),
        (optimizer("AdamW", lr="fast"), {}, ["optimizer.params.lr: learning_rate='fast'", "a number"]),
        (optimizer("AdamW", betas=0.9), {}, ["params.betas=0.9", "two numbers"]),
        (optimizer("SGD", betas=[0.9, 0.9]), {}, ["params.betas=", "not supported"]),
        (optimizer("SGD", momentum=0.9), {"optim_args": "momentum=0.5"}, ["params.momentum=0.9", "optim_args="]),
        ({"optimizer": {"type": "AdamW"}}, {}, ["optimizer.params: lr is missing", '"lr": "auto"']),
        ({"optimizer": {}}, {}, ["optimizer={}", '"type" and "params"']),
        ({"optimizer": {"type": "AdamW", "legacy_fusion": True}}, {}, ["optimizer.legacy_fusion=True"]),
        (scheduler("WarmupLR"), {"lr_scheduler_type": "cosine"}, ["type='WarmupLR'", "lr_scheduler_type='cosine'"]),
        (scheduler("WarmupDecayLR"), {}, ["total_num_steps is missing", "max_steps"]),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            {},
            ["warmup_max_lr is missing", "learning_rate"],
        ),
        (scheduler("WarmupDecayLR", total_num_steps=9), {"max_steps": 8}, ["total_num_steps=9", "max_steps=8"]),
        (scheduler("WarmupLR", warmup_num_steps=9), {"warmup_steps": 8}, ["warmup_num_steps=9", "warmup_steps=8"]),
        (scheduler("WarmupLR", warmup_num_steps=9), {"warmup_ratio": 0.1}, ["warmup_num_steps=9", "warmup_ratio=0.1"]),
        (scheduler("WarmupLR", warmup_num_steps=0), {}, ["warmup_num_steps=0", "at least 1"]),
        (scheduler("WarmupLR", warmup_min_lr=1e-7), {}, ["warmup_min_lr=1e-07", "set 0"]),
        (scheduler("WarmupLR", warmup_max_lr=1e-3), {"learning_rate": 1e-4}, ["warmup_max_lr=", "learning_rate="]),
        (scheduler("WarmupLR", warmup_type="cosine"), {}, ["warmup_type='cosine'", "log or linear"]),
        (scheduler("WarmupLR", warm_up=3), {}, ["params.warm_up=3", "no such parameter"]),
        (scheduler("WarmupCosineLR"), {}, ["type='WarmupCosineLR'", "cosine_with_min_lr"]),
        (scheduler("OneCycle"), {}, ["type='OneCycle'", "WarmupLR, WarmupDecayLR"]),
    ],
)
def test_unsupported_sections(base: dict[str, Any], given: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        CPOConfig("out", deepspeed=base, **given)
    for part in ["DeepSpeed mapping: ", *said]:
        assert part in str(caught.value)


def test_sections_set_after_construction() -> None:
    base = optimizer("SGD", lr=0.5)
    options = CPOConfig("out")
    options.deepspeed = base
    sealed = options.sealed()
    assert (options.optim, options.learning_rate) == ("adamw_torch", 1e-6)
    assert (sealed.optim, sealed.learning_rate) == ("sgd", 0.5)
    assert without_sections(LoadedConfig(base, "x")) == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize(("kind", "theirs"), [("WarmupLR", WarmupLR), ("WarmupDecayLR", WarmupDecayLR)])
def test_learning_rates_match_deepspeed(kind: str, theirs: type, warmup_type: str) -> None:
    """DeepSpeed's are a step late: its schedules return 0 again after the first step."""
    length: dict[str, Any] = {"total_num_steps": "auto"} if kind == "WarmupDecayLR" else {}
    base = scheduler(kind, warmup_num_steps=4, warmup_max_lr=8.0, warmup_type=warmup_type, **length)
    ours = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=8.0)
    schedule = build_scheduler(ours, CPOConfig("out", deepspeed=base, max_steps=10), 10)
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=8.0)
    length = {"total_num_steps": 10} if length else {}
    reference = theirs(other, warmup_max_lr=8.0, warmup_num_steps=4, warmup_type=warmup_type, **length)
    for _ in range(11):
        ours.step()
        reference.step()
        assert schedule.get_last_lr() == pytest.approx(reference.get_last_lr(), rel=1e-12)
        schedule.step()


@pytest.mark.parametrize(("base", "decays"), [(optimizer("SGD", weight_decay=0.1), [0.1, 0.1]), (None, [0.1, 0.0])])
def test_weight_decay_with_a_section_applies_to_biases_and_norms(
    base: dict[str, Any] | None, decays: list[float]
) -> None:
    options = CPOConfig("out", optim="sgd", weight_decay=0.1, deepspeed=base)
    made = build_optimizer(torch.nn.Linear(2, 2), options)
    assert [group["weight_decay"] for group in made.param_groups] == decays


def test_notes_at_the_start_of_a_run() -> None:
    base = optimizer("SGD", lr=0.5) | {"scheduler": scheduler("WarmupLR", warmup_num_steps=3)["scheduler"]}
    assert notes(CPOConfig("out")) == []
    first, second = notes(CPOConfig("out", deepspeed=base))
    assert first.startswith("DeepSpeed mapping: optimizer SGD sets optim='sgd', learning_rate=0.5, ")
    assert "scheduler WarmupLR sets lr_scheduler_type='constant_with_warmup'" in second
    assert "warmup_steps=3" in second


def test_sections_are_not_passed_to_deepspeed() -> None:
    """With them, DeepSpeed would build its own optimizer and schedule."""
    from helpers import tiny_config

    from alignment.models.source import ModelSource
    from alignment.planning.engines import plan_engines

    options = CPOConfig("out", deepspeed={**optimizer("AdamW", **ADAMW), **scheduler("WarmupLR")}, use_cpu=True)
    plan = plan_engines(options, ModelSource("model", None, tiny_config("tied"), {}), None)
    assert plan.policy["zero_optimization"]["stage"] == 2
    assert {"optimizer", "scheduler"}.isdisjoint(plan.policy)
