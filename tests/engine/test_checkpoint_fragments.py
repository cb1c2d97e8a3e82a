"""Optimizer fragments with real engines: bitwise at the same split, up to rounding at any other, and errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from support.fragment_runs import (
    BF16_LAYERS,
    LAYERS,
    Case,
    continued,
    differences,
    engine,
    everything,
    masters,
    restore,
    save,
    train,
)
from support.pairwise import Combination, pairwise
from torch import Tensor

from alignment.checkpoint.fragments import fragment_file
from alignment.checkpoint.optimizer_state import read_fragments, restore_group_settings, trained_names
from alignment.checkpoint.tensors import TensorFile, write_tensors
from alignment.config.errors import CheckpointError
from alignment.engines import optimizers
from alignment.engines.optimizers import GROUP
from alignment.engines.scoring import PolicyEngine
from alignment.internals.deepspeed_state import inner_optimizer, state_units
from alignment.planning.live import live_bytes
from benchmarks import checkpoint as benchmark

pytestmark = pytest.mark.usefixtures("one_rank")
FACTORS = {
    "layout": [*LAYERS, *BF16_LAYERS],
    "dtype": ["fp32", "bf16", "fp16"],
    "optim": ["adamw_torch", "adamw_8bit", "sgd:momentum=0.9", "sgd", "adamw_torch:amsgrad=true,fused=false"],
    "more": ["", "/frozen", "/exported", "/exported/partly"],
}


def grid() -> list[str]:
    """Every pair of layout, number format, optimizer, and which parameters are frozen or in the model's files."""

    def text(chosen: Combination) -> str:
        return f"{chosen['layout']}/{chosen['dtype']}/{chosen['optim']}{chosen['more']}"

    def allowed(chosen: Combination) -> bool:
        return chosen["dtype"] == "bf16" or chosen["layout"] not in BF16_LAYERS

    return [text(chosen) for chosen in pairwise(FACTORS, allowed)]


A_FEW = [
    *("stage0/fp32/adamw_torch", "stage0/bf16/adamw_torch/frozen", "stage0/fp16/sgd:momentum=0.9"),
    *("stage2/fp32/adamw_8bit/exported", "stage0/fp32/sgd/exported/partly", "stage2/fp32/sgd/exported/partly"),
    *("stage2-offload/fp16/adamw_torch:amsgrad=true", "stage3-sub-groups/bf16/adamw_torch/frozen"),
]
# The user's own, with scalars of their own (NAdam, ASGD), factors of a matrix (Adafactor), states from the start
# (Adagrad; with ZeRO, DeepSpeed's own reconstruction of it allows only one group).
A_FEW += [f"stage0/fp32/torch.{name}" for name in ("NAdam", "Adafactor", "RMSprop", "ASGD", "Adagrad")]
A_FEW += [f"stage2/fp32/torch.{name}" for name in ("NAdam", "Adafactor", "RMSprop", "ASGD")]


# Compiled; at stage 0 in 16 bits, fused Adam has a separate wrapper.
SLOW = [f"stage0/{dtype}/deepspeed_fused_adam" for dtype in ("fp32", "bf16", "fp16")]
for layout in ("stage2", "stage2-offload", "stage3-offload"):
    SLOW += [f"{layout}/{dtype}/deepspeed_cpu_adam" for dtype in ("fp32", "bf16")]
MARKED = [*(pytest.param(text, marks=pytest.mark.ci) for text in grid())]
MARKED += [pytest.param(text, marks=pytest.mark.slow) for text in SLOW]


@pytest.mark.parametrize("text", [*A_FEW, *MARKED])
def test_continued_bitwise(text: str, tmp_path: Path) -> None:
    """After 40 steps, the CPU Adam's running products of the betas differ from the results of `pow`."""
    assert continued(Case.of(text), tmp_path / "saved", 40 if "cpu_adam" in text else 3, 2) == []


@pytest.mark.parametrize("steps", [0, 2])
def test_an_engine_that_has_made_steps_is_reset(steps: int, tmp_path: Path) -> None:
    """Before the first step there are no states."""
    policy = engine(Case("stage2"), tmp_path)
    train(policy, 0, steps)
    beside, wanted = save(policy, tmp_path), everything(policy)
    train(policy, steps, 2)
    assert differences(everything(policy), wanted)
    restore(policy, tmp_path, beside)
    assert differences(everything(policy), wanted) == []
    policy.close()


def rewritten(path: Path, changes: dict[str, str], **replaced: Tensor) -> None:
    """Rewrite a file with other text in its index, or other tensors."""
    file = TensorFile(path)
    metadata, tensors = dict(file.metadata), {name: file.tensor(name).clone() for name in file.keys}
    tensors |= replaced
    for change, into in changes.items():
        assert change in metadata["fragments"]
        metadata["fragments"] = metadata["fragments"].replace(change, into, 1)
    write_tensors(path, tensors, metadata)


def test_scalars_that_are_merged(tmp_path: Path) -> None:
    """The largest step count is used; all other values must agree."""
    policy = engine(Case("stage0", optim="torch.NAdam"), tmp_path)
    train(policy, 0, 3)
    save(policy, tmp_path)
    policy.close()
    policy = engine(Case("stage2", optim="torch.NAdam"), tmp_path, seed=1)
    path = tmp_path / fragment_file(0, 1)
    rewritten(path, {}, **{"unit-1.step": torch.tensor(1.0)})
    read_fragments(policy, tmp_path)
    found = everything(policy)
    assert [float(found[f"{unit}.step"]) for unit in (0, 1)] == [3, 3]
    rewritten(path, {}, **{"unit-1.mu_product": torch.tensor(0.5)})
    with pytest.raises(CheckpointError, match="torch.NAdam .*'mu_product'"):
        read_fragments(policy, tmp_path)
    policy.close()


def test_parameters_without_gradients_have_zero_states(tmp_path: Path) -> None:
    policy = engine(Case("stage0"), tmp_path)
    train(policy, 0, 2)
    unit = state_units(policy.engine)[1]
    name = trained_names(policy.scorer.model)[unit.pieces[0].parameter]
    inner_optimizer(policy.engine).state.pop(unit.master)
    save(policy, tmp_path)
    policy.close()
    policy = engine(Case("stage2"), tmp_path, seed=1)
    train(policy, 0, 1)  # states that must be overwritten
    read_fragments(policy, tmp_path)
    names = trained_names(policy.scorer.model)
    for unit in state_units(policy.engine):
        moments = inner_optimizer(policy.engine).state[unit.master]["exp_avg_sq"]
        for piece in unit.pieces:
            part = moments[piece.offset : piece.offset + piece.numel]
            assert bool(part.any()) == (names[piece.parameter] != name)
    policy.close()


def peak_of(step: Callable[[], float], policy: PolicyEngine) -> int:
    """Return the largest number of bytes that an optimizer step needs beyond what exists before it."""
    states = inner_optimizer(policy.engine).state
    known = [*policy.scorer.parameters(), *states, *(one for state in states.values() for one in state.values())]
    gradients = policy.engine.optimizer.averaged_gradients.values()
    with live_bytes([*known, *(gradient for group in gradients for gradient in group)]) as live:
        step()
    return live.peak


def test_groups_are_split_so_that_a_step_takes_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The updates are those of two groups, and each of both resumes what the other has saved."""
    case, found = Case.of("stage2/bf16/adamw_torch"), []
    for first, then in ((GROUP, 2000), (2000, GROUP)):
        monkeypatch.setattr(optimizers, "GROUP", first)
        policy = engine(case, tmp_path)
        train(policy, 0, 2)
        beside = save(policy, tmp_path)
        with mock.patch.object(policy, "step", functools.partial(peak_of, policy.step, policy)):
            peak = train(policy, 2, 1)
        found.append((len(inner_optimizer(policy.engine).param_groups), *peak, masters(policy)))
        policy.close()
        monkeypatch.setattr(optimizers, "GROUP", then)
        policy = engine(case, tmp_path, seed=1)
        restore(policy, tmp_path, beside)
        train(policy, 2, 1)
        for name, value in masters(policy).items():
            torch.testing.assert_close(value, found[-1][-1][name], rtol=1e-6, atol=1e-7)
        policy.close()
    assert [groups for groups, *_ in found] == [2, 12]
    assert found[1][1] <= 6 * 2000 < 0.2 * found[0][1]  # bf16 and fp32 copies of the gradients of a group


@pytest.mark.slow
def test_the_peak_memory_of_a_load(tmp_path: Path) -> None:
    assert benchmark.measure({"megabytes": 500, "stage": 3, "dtype": "bf16", "folder": str(tmp_path)}) <= 1.10


@pytest.mark.parametrize(
    ("saved", "resumed", "said"),
    [
        ("stage2/fp32/adamw_torch", "stage2/fp32/sgd", "optimizer is torch.AdamW .* torch.SGD"),
        ("stage2/fp32/adamw_torch", "stage2/fp32/adamw_torch/frozen", r"embed_tokens.weight is \(53, 27\)"),
        ("stage2/fp32/adamw_torch/frozen", "stage2/fp32/adamw_torch", r"embed_tokens.weight is not .* \(53, 27\)"),
        ("stage2/bf16/adamw_torch", "stage2-bf16-masters/bf16/adamw_torch", "float32.*bfloat16"),
        ("stage2/fp32/adamw_8bit", "stage3-sub-groups/fp32/adamw_8bit", "bitsandbytes.AdamW .* ZeRO stage 2 on 1"),
    ],
)
def test_another_run_is_refused_and_nothing_changes(saved: str, resumed: str, said: str, tmp_path: Path) -> None:
    policy = engine(Case.of(saved), tmp_path)
    train(policy, 0, 1)
    save(policy, tmp_path)
    policy.close()
    policy = engine(Case.of(resumed), tmp_path, seed=1)
    before = everything(policy)
    with pytest.raises(CheckpointError, match=said):
        read_fragments(policy, tmp_path)
    assert differences(everything(policy), before) == []
    policy.close()


def test_files_that_are_missing_or_of_another_split(tmp_path: Path) -> None:
    policy = engine(Case("stage2"), tmp_path)
    with pytest.raises(CheckpointError, match="has none"):
        read_fragments(policy, tmp_path)
    save(policy, tmp_path, exported=True)
    with pytest.raises(CheckpointError, match="fp32 weights of model.embed_tokens.weight"):
        read_fragments(policy, tmp_path)
    with pytest.raises(CheckpointError, match="1 parameter groups, .* 2"):
        restore_group_settings(policy, [{}])
    save(policy, tmp_path)
    path, whole = tmp_path / fragment_file(0, 1), (tmp_path / fragment_file(0, 1)).read_bytes()
    piece = '"pieces":[["model.embed_tokens.weight",0,0'
    for change, into, said in (
        ('"ranks":1', '"ranks":2', "00001-of-00001"),
        (f"{piece},1431]", f"{piece},5]", "element 5"),
        (piece, piece[:-1] + "99999", "elements"),
    ):
        rewritten(path, {change: into})
        with pytest.raises(CheckpointError, match=said) as caught:
            read_fragments(policy, tmp_path)
        assert str(tmp_path) in str(caught.value)
        path.write_bytes(whole)
    policy.close()
