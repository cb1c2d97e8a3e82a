"""transformers' optimizers other than AdamW: built as by its Trainer, the same step at every split, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import STAGES, make_model, options, paired_rows
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from alignment import CPOConfig, CPOTrainer
from alignment.config.errors import OptionError
from alignment.config.refusals import OTHER_OPTIMIZERS, WORKING_OPTIMIZERS
from alignment.engines.optimizers import KINDS, build_optimizer, step_bytes

OWN = ("deepspeed_cpu_adam", "deepspeed_fused_adam")
ARGUMENTS = {
    "ademamix": "beta3=0.99,alpha=2.0,t_alpha=5", "rmsprop": "momentum=0.5,centered=true",
    "rmsprop_bnb": "alpha=0.9,eps=0.001", "sgd": "momentum=0.5,nesterov=true",
}  # fmt: skip


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


@pytest.mark.parametrize("optim", ["galore_adamw", "adamw_torch_4bit", "schedule_free_sgd"])
def test_other_packages_are_named(optim: str) -> None:
    with pytest.raises(OptionError, match=f"optim='{optim}': optimizers of the package {OTHER_OPTIMIZERS[optim]}"):
        CPOConfig("out", optim=optim)


def test_options_without_effect() -> None:
    with pytest.raises(OptionError, match="adam_epsilon=1e-06: has no effect with optim='lion_8bit'"):
        CPOConfig("out", optim="lion_8bit", adam_epsilon=1e-6)
    assert CPOConfig("out", optim="paged_lion_32bit", adam_beta1=0.8).adam_beta1 == 0.8


def ended(model: str, folder: Path, stage: str, optim: str, **more: Any) -> dict[str, Tensor]:
    """The weights after a run of three steps."""
    return run(model, folder, stage, optim, **more)[0]


def run(model: str, folder: Path, stage: str, optim: str, **more: Any) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after a run of three steps, and its losses."""
    given = {"max_steps": 3, "optim": optim, "deepspeed": STAGES[stage], "save_strategy": "steps", "save_steps": 2}
    args = CPOConfig(**options(folder, **{**given, "weight_decay": 0.1, "optim_args": ARGUMENTS.get(optim), **more}))
    trainer = CPOTrainer(model=model, args=args, train_dataset=paired_rows(12))
    trainer.train()
    trainer.save_model(folder / "saved")
    trainer.close()
    from safetensors.torch import load_file

    course = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return load_file(folder / "saved" / "model.safetensors"), course


RATES = {"lion_8bit": 1e-3}  # of a step of the same size for every weight
EXACT = ["rmsprop", "lion_32bit", "ademamix", "rmsprop_bnb"]
SAMPLE = ("ademamix", "adafactor")


def sampled(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.ci if name in SAMPLE else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("optim", sampled([*EXACT, "adafactor"]))
def test_the_same_step_at_every_stage_and_after_a_restart(optim: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "policy", "tied", seed=1)
    whole = ended(model, tmp_path / "whole", "stage0", optim)
    last = "stage0"
    if optim != "adafactor":
        last = "stage3"
        for stage in ("stage2", "stage3"):
            divided = ended(model, tmp_path / stage, stage, optim)
            moved = max(float((whole[name] - divided[name]).abs().max()) for name in whole)
            assert moved < 3e-6, (stage, moved)  # a step is about 1e-3
        whole = divided
    before = tmp_path / ("whole" if last == "stage0" else last) / "out"
    more = {"resume_from_checkpoint": str(before / "checkpoint-2")}
    resumed = ended(model, tmp_path / "resumed", last, optim, **more)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize(("optim", "wide"), [(f"{name}_8bit", name) for name in ("lion", "ademamix", "rmsprop_bnb")])
def test_8_bits_learn_like_32(optim: str, wide: str, tmp_path: Path) -> None:
    """At every stage, the losses are those of 32 bits within a fraction of their decrease; a restart is exact."""
    model = make_model(tmp_path / "policy", "tied", seed=1)
    more: dict[str, Any] = {"max_steps": 10, "logging_steps": 1, "learning_rate": RATES.get(optim, 3e-3)}
    wide = wide if wide in KINDS else f"{wide}_32bit"
    _, course = run(model, tmp_path / "exact", "stage0", wide, **more)
    fall = course[0] - course[-1]
    assert fall > 0.5
    for stage in ("stage0", "stage2", "stage3"):
        found, rounded = run(model, tmp_path / stage, stage, optim, **more)
        assert rounded == pytest.approx(course, abs=0.3 * fall), stage
    more["resume_from_checkpoint"] = str(tmp_path / stage / "out" / "checkpoint-8")
    resumed = ended(model, tmp_path / "resumed", stage, optim, **more)
    assert all(torch.equal(resumed[name], found[name]) for name in found)


def test_adafactor_needs_unsharded_matrices(tmp_path: Path) -> None:
    model = make_model(tmp_path / "policy", "tied", seed=1)
    args = CPOConfig(**options(tmp_path, optim="adafactor", deepspeed="zero2"))
    with pytest.raises(OptionError, match=r"^optim='adafactor': .*stage=2\); set deepspeed to zero0"):
        CPOTrainer(model=model, args=args, train_dataset=paired_rows(4))


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
