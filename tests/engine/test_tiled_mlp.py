"""MLPs that are computed in slices give the updates of those that are not, at every stage, and need less memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS, RankServer
from safetensors.torch import load_file
from support.helpers import STAGES, make_model, options, paired_rows, train_and_close, zero
from support.pairwise import pairwise
from support.split_grid import CHECKPOINTING

from alignment import CPOConfig, CPOTrainer
from alignment.models import tiled_mlp

WIDTH = 32  # of the model, and the largest number of tokens of a slice
MLP = ["gate_proj", "up_proj", "down_proj"]
LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0}
TRAINED: dict[str, dict[str, Any]] = {
    "whole": {},
    "lora": LORA,
    "only MLPs": {**LORA, "lora_target_modules": MLP},
    "only the first MLP": {**LORA, "lora_target_modules": r".*layers\.0\.mlp\.\w+_proj"},
    "4 bits": {**LORA, "load_in_4bit": True},
}
GRID = pairwise(
    {
        "stage": ("stage0", "stage1", "stage2", "stage3", "stage3-offload"),
        "trained": tuple(TRAINED),
        "checkpointing": tuple(CHECKPOINTING),
    },
    lambda case: True,
)
DEFAULT = [("stage3", "only the first MLP", "checkpointed"), ("stage2", "whole", "reentrant")]


def cases() -> list[Any]:
    found = [tuple(case.values()) for case in GRID]
    rest = [pytest.param(*case, marks=pytest.mark.ci) for case in found if case not in DEFAULT]
    return [*DEFAULT, *rest]


def run_options(folder: Path, stage: str, trained: str, checkpointing: str, **more: Any) -> dict[str, Any]:
    """Two steps of SGD on two micro-batches of up to 150 tokens; adapters begin at 0, so only the second uses both."""
    sgd = {"optim": "sgd", "learning_rate": 0.05, "max_grad_norm": 0.0, "max_steps": 2}
    config = zero(1) if stage == "stage1" else STAGES[stage]
    return options(folder, **sgd, deepspeed=config, **TRAINED[trained], **CHECKPOINTING[checkpointing], **more)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    [file] = [*folder.glob("*model.safetensors")]
    return load_file(file)


def trained_weights(model: str, folder: Path, *case: str, **more: Any) -> dict[str, torch.Tensor]:
    args = CPOConfig(**run_options(folder, *case, **more))
    return weights(train_and_close(CPOTrainer(model=model, args=args, train_dataset=paired_rows(8)), True).output_dir)


def assert_equal_updates(found: dict[str, Any], expected: dict[str, Any], start: dict[str, Any]) -> None:
    """Compare the changes of all weights; adapters are compared with the half of them that begins at 0."""
    assert found.keys() == expected.keys() and expected
    for name, value in expected.items():
        before = start.get(name)
        if before is None and "lora_A" in name:
            assert torch.allclose(found[name], value, rtol=0, atol=1e-6), name
            continue
        update = value if before is None else value - before
        assert update.norm() > 1e-5, name
        assert (found[name] - value).norm() <= 1e-6 * max(update.norm(), value.norm()), name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of tokens of the slices that are checkpointed."""
    found: list[int] = []
    plain = tiled_mlp.checkpoint

    def counted(whole: Callable[..., Any], part: torch.Tensor, **how: Any) -> Any:
        found.append(part.shape[1])
        return plain(whole, part, **how)

    monkeypatch.setattr(tiled_mlp, "checkpoint", counted)
    yield found


@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize(("stage", "trained", "checkpointing"), cases())
def test_updates_are_those_without_slices(
    stage: str, trained: str, checkpointing: str, model: str, tmp_path: Path, slices: list[int]
) -> None:
    case = (stage, trained, checkpointing)
    expected = trained_weights(model, tmp_path / "whole", *case)
    assert not slices
    found = trained_weights(model, tmp_path / "tiled", *case, tiled_mlp=True)
    assert len(slices) > 20 and max(slices) <= WIDTH
    assert_equal_updates(found, expected, weights(Path(model)))
