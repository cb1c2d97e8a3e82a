"""Optimizers by name: built as by transformers, the same step at every stage, 8 bits, compiled ones, the fallback."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file
from support.helpers import STAGES, options, paired_rows, train_and_close
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from alignment import CPOConfig, CPOTrainer
from alignment.config import deepspeed as deepspeed_json
from alignment.config.dtypes import plan_dtypes
from alignment.config.errors import OptionError
from alignment.config.options_training import Optimizer
from alignment.engines.optimizers import KINDS, build_optimizer, check_optimization, step_bytes

WORKING_OPTIMIZERS = get_args(Optimizer)
OWN = ("deepspeed_cpu_adam", "deepspeed_fused_adam")
ARGUMENTS = {
    "ademamix": "beta3=0.99,alpha=2.0,t_alpha=5", "rmsprop": "momentum=0.5,centered=true",
    "rmsprop_bnb": "alpha=0.9,eps=0.001", "sgd": "momentum=0.5,nesterov=true",
}  # fmt: skip


def run(model: str, folder: Path, stage: str, optim: str, **more: Any) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after a run of three steps, and its losses."""
    given = {"max_steps": 3, "optim": optim, "deepspeed": STAGES[stage], "save_strategy": "steps", "save_steps": 2}
    args = CPOConfig(**options(folder, **{**given, "weight_decay": 0.1, "optim_args": ARGUMENTS.get(optim), **more}))
    trainer = train_and_close(CPOTrainer(model=model, args=args, train_dataset=paired_rows(12)), save=folder / "saved")
    course = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return load_file(folder / "saved" / "model.safetensors"), course


@pytest.mark.parametrize("optim", [name for name in WORKING_OPTIMIZERS if name not in OWN])
def test_they_are_built_as_by_transformers(optim: str, tmp_path: Path) -> None:
    given = {"optim": optim, "optim_args": ARGUMENTS.get(optim), "learning_rate": 0.5}
    layer = nn.Linear(2, 2)
    made = build_optimizer(layer, CPOConfig("out", **given))
    kind, arguments = Trainer.get_optimizer_cls_and_kwargs(TrainingArguments(str(tmp_path), use_cpu=True, **given))
    if optim == "rmsprop_bnb":  # which it passes on as strings
        arguments |= {"alpha": 0.9, "eps": 0.001}
    theirs = kind(layer.parameters(), **arguments)
    assert type(made) is type(theirs)
    fused = {"fused", "foreach", "weight_decay"}  # no numerical difference; the groups have their own decay
    assert {k: v for k, v in made.defaults.items() if k not in fused} == {
        k: v for k, v in theirs.defaults.items() if k not in fused
    }
    args = [vars(one.args) if hasattr(one, "args") else {} for one in (made, theirs)]
    assert args[0] == args[1] and getattr(made, "is_paged", None) == getattr(theirs, "is_paged", None)


def test_options_without_effect() -> None:
    assert CPOConfig("out", optim="paged_lion_32bit", adam_beta1=0.8).adam_beta1 == 0.8
    with pytest.raises(OptionError, match="adamw_8bit ignores amsgrad"):
        build_optimizer(nn.Linear(2, 2), CPOConfig("out", optim="adamw_8bit", optim_args="amsgrad=true"))
    made = build_optimizer(nn.Linear(2, 2), CPOConfig("out", optim_args="amsgrad=true"))
    assert made.defaults["amsgrad"] is True


@pytest.mark.parametrize("bf16", [False, True])
def test_adam_starts_at_step_0(model: str, tmp_path: Path, bf16: bool) -> None:
    """In 16 bits at stage 0, DeepSpeed makes a step on zero gradients; weight decay makes it visible."""
    courses = {}
    for stage in ("stage0", "stage2", "stage3"):
        given = {"learning_rate": 3e-3, "weight_decay": 10.0, "max_steps": 2}
        args = CPOConfig(**options(tmp_path / stage, deepspeed=STAGES[stage], bf16=bf16, **given))
        trainer = CPOTrainer(model=model, args=args, train_dataset=paired_rows(12), eval_dataset=paired_rows(12))
        trainer.engines.build(2)
        optimizer = trainer.engines.models.policy.engine.optimizer
        assert hasattr(optimizer, "fp32_groups") == (bf16 and stage == "stage0")
        for masters, weights in zip(getattr(optimizer, "fp32_groups", ()), getattr(optimizer, "fp16_groups", ())):
            assert all(torch.equal(master, weight.float()) for master, weight in zip(masters, weights))
        trainer.train()
        inner = getattr(optimizer, "optimizer", optimizer)
        assert {float(state["step"]) for state in inner.state.values()} == {2.0}, stage
        courses[stage] = [
            trainer.evaluate()["eval_loss"],
            *(e["loss"] for e in trainer.state.log_history if "loss" in e),
        ]
        trainer.close()
    for stage in ("stage0", "stage3"):
        assert courses[stage] == pytest.approx(courses["stage2"], rel=2e-3 if bf16 else 1e-5), stage


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_32bit"])
def test_states_have_the_bits_of_the_name(optim: str) -> None:
    layer = nn.Linear(128, 64)
    made = build_optimizer(layer, CPOConfig(output_dir="out", optim=optim))
    assert isinstance(made, bitsandbytes.optim.AdamW) and made.is_paged == optim.startswith("paged")
    layer(torch.ones(1, 128)).sum().backward()
    made.step()
    wanted = torch.uint8 if "8bit" in optim else torch.float32
    assert made.state[layer.weight]["state1"].dtype == made.state[layer.weight]["state2"].dtype == wanted


@pytest.mark.parametrize("optim", ["lion_8bit", "lion_32bit", "ademamix", "ademamix_8bit", "rmsprop_bnb", "rmsprop"])
def test_states_have_the_planned_size(optim: str) -> None:
    layer, given = nn.Linear(256, 256, bias=False), ARGUMENTS.get(optim)
    args = CPOConfig("out", optim=optim, optim_args=given)
    made = build_optimizer(layer, args)
    layer(torch.ones(1, 256)).sum().backward()
    made.step()
    parts = {k: v for k, v in made.state[layer.weight].items() if isinstance(v, Tensor) and not k.startswith("qmap")}
    kept = sum(part.numel() * part.element_size() for part in parts.values()) / layer.weight.numel()
    scratch = 4 * KINDS[optim].scratch
    assert step_bytes(args) - scratch == pytest.approx(kept, rel=1e-3)


@pytest.mark.parametrize(
    "optim",
    [pytest.param(name, marks=pytest.mark.ci) for name in ("ademamix", "adafactor")]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("rmsprop", "lion_32bit", "rmsprop_bnb")],
)
def test_the_same_step_at_every_stage_and_after_a_restart(model: str, optim: str, tmp_path: Path) -> None:
    whole, _ = run(model, tmp_path / "stage0", "stage0", optim)
    stages = ("stage0",) if optim == "adafactor" else ("stage0", "stage2", "stage3")
    for stage in stages[1:]:
        divided, _ = run(model, tmp_path / stage, stage, optim)
        moved = max(float((whole[name] - divided[name]).abs().max()) for name in whole)
        assert moved < 3e-6, (stage, moved)  # a step is about 1e-3
        whole = divided
    checkpoint = str(tmp_path / stages[-1] / "out" / "checkpoint-2")
    resumed, _ = run(model, tmp_path / "resumed", stages[-1], optim, resume_from_checkpoint=checkpoint)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("optim", "wide"),
    [pytest.param("adamw_8bit", "adamw_torch", marks=pytest.mark.ci)]
    + [
        pytest.param(f"{name}_8bit", wide, marks=pytest.mark.slow)
        for name, wide in (("lion", "lion_32bit"), ("ademamix", "ademamix"), ("rmsprop_bnb", "rmsprop_bnb"))
    ],
)
def test_8_bits_learn_like_32(model: str, optim: str, wide: str, tmp_path: Path) -> None:
    """At every stage, the losses are those of 32 bits within a fraction of their decrease; a restart is exact."""
    rate = 1e-3 if optim == "lion_8bit" else 3e-3  # Lion's step has the same size for every weight
    more: dict[str, Any] = {"max_steps": 10, "learning_rate": rate}
    _, course = run(model, tmp_path / "exact", "stage0", wide, **more)
    fall = course[0] - course[-1]
    assert fall > 0.5
    for stage in ("stage0", "stage2-offload", "stage3-offload", "stage2", "stage3"):
        found, rounded = run(model, tmp_path / stage, stage, optim, **more)
        assert rounded == pytest.approx(course, abs=0.3 * fall) and rounded != course, stage
    more["resume_from_checkpoint"] = str(tmp_path / stage / "out" / "checkpoint-8")
    resumed, _ = run(model, tmp_path / "resumed", stage, optim, **more)
    assert all(torch.equal(resumed[name], found[name]) for name in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optim", "stages"),
    [("deepspeed_cpu_adam", ("stage2-offload", "stage3-offload")), ("deepspeed_fused_adam", ("stage0", "stage2"))],
)
def test_compiled_adam_is_adam(model: str, tmp_path: Path, optim: str, stages: tuple[str, ...]) -> None:
    """Builds the op if this machine has not built it yet: one to three minutes."""
    more = {"max_steps": 15, "learning_rate": 3e-3}
    for stage in stages:
        _, exact = run(model, tmp_path / f"{stage}-exact", stage, "adamw_torch", **more)
        _, found = run(model, tmp_path / f"{stage}-found", stage, optim, **more)
        assert found == pytest.approx(exact, rel=1e-4)


def test_adafactor_needs_unsharded_matrices(model: str, tmp_path: Path) -> None:
    args = CPOConfig(**options(tmp_path, optim="adafactor", deepspeed="zero2"))
    with pytest.raises(OptionError, match=r"^optim='adafactor': .*stage=2\); set deepspeed to zero0"):
        CPOTrainer(model=model, args=args, train_dataset=paired_rows(4))


@pytest.mark.parametrize(
    ("optim", "file"), [("deepspeed_cpu_adam", "zero2"), ("deepspeed_fused_adam", "zero2_offload")]
)
def test_optimizers_for_the_other_kind_of_memory(optim: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = CPOConfig(output_dir="out", optim=optim, bf16=True)
    base = deepspeed_json.load_deepspeed_config(file, "zero2")
    plan = plan_dtypes(args, base)
    monkeypatch.setattr(deepspeed_json, "uses_cuda", lambda options: True)
    with pytest.raises(OptionError, match=f"^optim='{optim}'"):
        deepspeed_json.policy_config(args, base, plan, 1, 64)


@pytest.mark.parametrize("optim", OWN)
def test_torch_replaces_an_optimizer_without_a_compiler(optim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_optimization(CPOConfig("out"), 10) is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    args = CPOConfig("out", optim=optim)
    note = check_optimization(args, 10)
    assert note is not None and note.startswith(f"optim: {optim} ") and "g++" in note
    made = build_optimizer(nn.Linear(2, 2), args)
    assert type(made) is torch.optim.AdamW and made.defaults["fused"] is True
