"""Optimizers by name on real engines: 8-bit Adam at every kind of stage, DeepSpeed's compiled ones, the fallback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from helpers import STAGES, make_model, paired_rows
from torch import nn

from alignment import CPOConfig, CPOTrainer
from alignment.config import deepspeed as deepspeed_json
from alignment.config.dtypes import plan_dtypes
from alignment.config.errors import OptionError
from alignment.config.refusals import WORKING_OPTIMIZERS
from alignment.engines import optimizers
from alignment.engines.optimizers import KINDS, build_optimizer, check_optimization, missing_to_compile


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("models") / "policy", "tied", seed=1)


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "max_length": 64,
        "max_prompt_length": None,
        "num_train_epochs": 5,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **more,
    }


def losses(model: str, folder: Path, **more: Any) -> list[float]:
    args = CPOConfig(**options(folder, **more))
    trainer = CPOTrainer(model=model, args=args, train_dataset=paired_rows(12))
    trainer.train()
    trainer.close()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_every_supported_name_has_an_optimizer() -> None:
    assert set(KINDS) == set(WORKING_OPTIMIZERS)


@pytest.mark.parametrize("bf16", [False, True])
def test_adam_starts_at_step_0(model: str, tmp_path: Path, bf16: bool) -> None:
    """Including stage 0 in 16 bits, where DeepSpeed makes a step on zero gradients; weight decay makes it visible."""
    courses = {}
    for stage in ("stage0", "stage2", "stage3"):
        args = CPOConfig(
            **options(tmp_path / stage, deepspeed=STAGES[stage], bf16=bf16, weight_decay=10.0) | {"max_steps": 2}
        )
        trainer = CPOTrainer(model=model, args=args, train_dataset=paired_rows(12), eval_dataset=paired_rows(12))
        trainer.engines.build(2)
        assert trainer.engines.models is not None
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


def test_an_argument_that_an_optimizer_ignores() -> None:
    with pytest.raises(OptionError, match="adamw_8bit ignores amsgrad"):
        build_optimizer(nn.Linear(2, 2), CPOConfig(output_dir="out", optim="adamw_8bit", optim_args="amsgrad=true"))
    made = build_optimizer(nn.Linear(2, 2), CPOConfig(output_dir="out", optim_args="amsgrad=true"))
    assert made.defaults["amsgrad"] is True


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
def test_states_have_the_bits_of_the_name(optim: str) -> None:
    layer = nn.Linear(128, 64)
    made = build_optimizer(layer, CPOConfig(output_dir="out", optim=optim, adam_beta1=0.8))
    assert isinstance(made, bitsandbytes.optim.AdamW) and made.defaults["betas"] == (0.8, 0.999)
    assert made.is_paged == optim.startswith("paged")
    layer(torch.ones(1, 128)).sum().backward()
    made.step()
    wanted = torch.uint8 if "8bit" in optim else torch.float32
    assert made.state[layer.weight]["state1"].dtype == made.state[layer.weight]["state2"].dtype == wanted


@pytest.mark.ci
@pytest.mark.parametrize("stage", ["stage0", "stage2", "stage3", "stage2-offload", "stage3-offload"])
def test_8bit_adam_learns_like_adam(model: str, tmp_path: Path, stage: str) -> None:
    """Quantized moments change a step by a few percent: the losses follow the same course, not the same digits."""
    exact = losses(model, tmp_path / "exact", deepspeed=STAGES[stage])
    found = losses(model, tmp_path / "found", deepspeed=STAGES[stage], optim="adamw_8bit")
    assert found[-1] < found[0] - 1 and found != exact
    assert found == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(
    ("optim", "builder", "said"),
    [("deepspeed_cpu_adam", "CPUAdamBuilder", "g++"), ("deepspeed_fused_adam", "FusedAdamBuilder", "g++")],
)
def test_torch_replaces_an_optimizer_without_a_compiler(
    optim: str, builder: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert said in str(missing_to_compile(builder, cuda=False))
    args = CPOConfig(output_dir="out", optim=optim)
    note = check_optimization(args, 10)
    assert note is not None and note.startswith(f"optim: {optim} is compiled at first use, but this machine lacks")
    made = build_optimizer(nn.Linear(2, 2), args)
    assert type(made) is torch.optim.AdamW and made.defaults["fused"] is True


def test_no_note_if_nothing_is_replaced() -> None:
    assert check_optimization(CPOConfig(output_dir="out"), 10) is None


def test_without_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers.shutil, "which", lambda name: "/usr/bin/c++")
    monkeypatch.setattr(optimizers.cpp_extension, "is_ninja_available", lambda: False)
    assert "ninja" in str(missing_to_compile("CPUAdamBuilder", cuda=False))


@pytest.mark.parametrize(
    ("optim", "file", "said"),
    [
        ("deepspeed_cpu_adam", "zero2", "set deepspeed to zero2_offload or zero3_offload, or optim to adamw_torch"),
        ("deepspeed_fused_adam", "zero2_offload", "set optim to adamw_torch or deepspeed_cpu_adam"),
    ],
)
def test_optimizers_for_the_other_kind_of_memory(
    optim: str, file: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = CPOConfig(output_dir="out", optim=optim, bf16=True)
    base = deepspeed_json.load_deepspeed_config(file, "zero2")
    plan = plan_dtypes(args, base)
    monkeypatch.setattr(deepspeed_json, "uses_cuda", lambda options: True)
    with pytest.raises(OptionError, match="^optim=") as caught:
        deepspeed_json.policy_config(args, base, plan, 1, 64)
    assert said in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optim", "stages"),
    [("deepspeed_cpu_adam", ("stage2-offload", "stage3-offload")), ("deepspeed_fused_adam", ("stage0", "stage2"))],
)
def test_compiled_adam_is_adam(model: str, tmp_path: Path, optim: str, stages: tuple[str, ...]) -> None:
    """Builds the op if this machine has not built it yet: one to three minutes."""
    for stage in stages:
        exact = losses(model, tmp_path / f"{stage}-exact", deepspeed=STAGES[stage], weight_decay=0.1)
        found = losses(model, tmp_path / f"{stage}-found", deepspeed=STAGES[stage], weight_decay=0.1, optim=optim)
        assert found == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("without_compiler", [True, False])
def test_the_fused_adam_of_a_gpu_needs_the_cuda_toolkit(
    without_compiler: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(optimizers, "uses_cuda", lambda options: True)
    monkeypatch.setattr(optimizers.cpp_extension, "CUDA_HOME", str(tmp_path) if without_compiler else None)
    kind, note = optimizers.optimizer_kind(CPOConfig(**options(tmp_path, optim="deepspeed_fused_adam")))
    assert kind is KINDS["adamw_torch"]
    assert note is not None and "the CUDA toolkit (nvcc" in note and "using adamw_torch" in note
