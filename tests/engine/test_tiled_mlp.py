"""MLPs that are computed in slices give the updates of those that are not, at every stage, and need less memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from safetensors.torch import load_file
from support.data_tokenizers import PLAIN, char_tokenizer
from support.helpers import STAGES, make_model, options, paired_rows, tiny_config, train_and_close, zero
from support.pairwise import pairwise
from support.split_grid import CHECKPOINTING
from transformers import AutoModelForCausalLM
from transformers.activations import SiLUActivation

from alignment import CPOConfig, CPOTrainer, DPOConfig, DPOTrainer
from alignment.models import tiled_mlp
from alignment.models.source import ModelSource
from alignment.planning import activations
from alignment.planning.activations import Counting, Shape
from tools.ranks import RankServer

WIDTH = 32  # of the model, and the largest number of tokens of a slice
MLP = ["gate_proj", "up_proj", "down_proj"]
LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0}
TRAINED: dict[str, dict[str, Any]] = {
    "whole": {},
    "lora": LORA,
    "only MLPs": {**LORA, "lora_target_modules": MLP},
    "only the first MLP": {**LORA, "lora_target_modules": r".*layers\.0\.mlp\.\w+_proj"},
    "4 bits": {**LORA, "load_in_4bit": True},
    "8 bits": {**LORA, "load_in_8bit": True},
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
    return options(folder, **{**sgd, "deepspeed": config, **TRAINED[trained], **CHECKPOINTING[checkpointing], **more})


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
    """The numbers of tokens for which activations are computed in MLPs."""
    found: list[int] = []
    plain = SiLUActivation.forward

    def counted(self: SiLUActivation, states: torch.Tensor) -> torch.Tensor:
        found.append(states.shape[0] * states.shape[1])
        return plain(self, states)

    monkeypatch.setattr(SiLUActivation, "forward", counted)
    yield found


@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize(("stage", "trained", "checkpointing"), cases())
def test_updates_are_those_without_slices(
    stage: str, trained: str, checkpointing: str, model: str, tmp_path: Path, slices: list[int]
) -> None:
    case = (stage, trained, checkpointing)
    expected = trained_weights(model, tmp_path / "whole", *case)
    assert max(slices) > 3 * WIDTH
    slices.clear()
    found = trained_weights(model, tmp_path / "tiled", *case, tiled_mlp=True)
    assert len(slices) > 20 and max(slices) <= WIDTH
    assert_equal_updates(found, expected, weights(Path(model)))


@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize(
    "checkpointing", ["checkpointed", *(pytest.param(one, marks=pytest.mark.ci) for one in ("unchecked", "reentrant"))]
)
def test_slices_are_recomputed_with_their_own_dropout_masks(
    checkpointing: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with slices that are not recomputed, for which masks are drawn in the same order."""
    case, dropout = ("stage2", "only MLPs", checkpointing), {"lora_dropout": 0.4, "disable_dropout": False}
    found = trained_weights(model, tmp_path / "tiled", *case, tiled_mlp=True, **dropout)
    monkeypatch.setattr(tiled_mlp, "checkpoint", lambda compute, *args, **_: compute(*args))
    expected = trained_weights(model, tmp_path / "stored", *case, tiled_mlp=True, **dropout)
    assert_equal_updates(found, expected, {})


@pytest.mark.ci
@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize("placement", ["sharded", "replica"])
def test_references_and_evaluations_are_computed_in_slices(
    placement: str, model: str, tmp_path: Path, slices: list[int]
) -> None:
    """Also those of a live model, which is computed as a whole in its next run."""
    live, losses = AutoModelForCausalLM.from_pretrained(model), []
    for number, tiles in enumerate((True, False)):
        more = {"tiled_mlp": tiles, "ref_placement": placement, "learning_rate": 0.0, "eval_on_start": True}
        args = DPOConfig(**run_options(tmp_path / str(number), "stage2", "whole", "checkpointed", **more))
        rows, tokenizer = paired_rows(8), char_tokenizer(template=PLAIN)
        trainer = DPOTrainer(live, args=args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer)
        slices.clear()
        train_and_close(trainer)
        assert (max(slices) <= WIDTH) == tiles
        losses += [record["eval_logps/chosen"] for record in trainer.state.log_history if "eval_loss" in record]
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_ranks_may_have_different_numbers_of_slices(model: str, tmp_path: Path, ranks: RankServer) -> None:
    """The first rank computes three slices and the second one none, with the weights of ZeRO-3 gathered once."""
    long = {"prompt": "ab", "chosen": "c" * 40, "rejected": "d" * 40}
    short = {"prompt": "ef", "chosen": "gh", "rejected": "ij"}
    size = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    runs = []
    for name in ("whole", "tiled"):
        more = {**size, "train_sampling_strategy": "sequential", "tiled_mlp": name == "tiled"}
        args = run_options(tmp_path / name, "stage3", "whole", "checkpointed", **more)
        save = str(tmp_path / f"{name}-saved")
        runs.append(
            {"name": name, "trainer": "CPO", "model": model, "args": args, "train": [long, short] * 2, "save": save}
        )
    (tmp_path / "spec.json").write_text(json.dumps(runs))
    ranks.run(DRIVERS / "runs.py", tmp_path / "spec.json", timeout=180)
    found, expected = (weights(tmp_path / f"{name}-saved") for name in ("tiled", "whole"))
    assert_equal_updates(found, expected, weights(Path(model)))


@pytest.mark.usefixtures("own_process_group")
def test_zero3_gathers_an_mlp_once_per_pass(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once per slice, and with one trace of the modules, although the number of slices changes."""
    gathered: list[str] = []
    traces: list[None] = []
    fetch, forget = PartitionedParameterCoordinator.fetch_sub_module, PartitionedParameterCoordinator._invalidate_trace

    def fetched(self: Any, module: torch.nn.Module, forward: bool) -> None:
        gathered.append(type(module).__name__)
        fetch(self, module, forward)

    def forgotten(self: Any) -> None:
        traces.append(None)
        forget(self)

    monkeypatch.setattr(PartitionedParameterCoordinator, "fetch_sub_module", fetched)
    monkeypatch.setattr(PartitionedParameterCoordinator, "_invalidate_trace", forgotten)
    args = CPOConfig(**run_options(tmp_path, "stage3", "whole", "checkpointed", tiled_mlp=True))
    trainer = CPOTrainer(model=model, args=args, train_dataset=paired_rows(8))
    trainer.engines.build(2)
    gathered.clear()
    traces.clear()
    train_and_close(trainer)
    passes, layers = 2 * 2, 2
    assert gathered.count("LlamaMLP") == 3 * passes * layers, "forward pass, recomputation and backward pass"
    assert gathered.count("SiLUActivation") == 0 and len(traces) <= 1


def test_memory_grows_less_with_the_number_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tensors of the size of the hidden states per layer: the planner's count, which needs no values."""
    monkeypatch.setattr(activations, "_FOLDER", tmp_path)  # not the count of an earlier run
    grown = {}
    for mlp in (None, "mlp"):
        source = wide_source(mlp)
        counting = Counting(source, None, torch.float32, "flash", checkpointing={"use_reentrant": False})
        small, large = (
            sum(counting(Shape(1, width, 4), gradients=True, recomputed=True)[0].of(2).values())
            for width in (256, 512)
        )
        grown[mlp] = (large - small) / 256 / (4 * WIDTH)
    assert grown[None] > 100 and grown["mlp"] < 16


def wide_source(mlp: str | None) -> ModelSource:
    """A model whose MLP is 16 times as wide as its hidden states."""
    config = tiny_config("untied")
    config.intermediate_size, config.max_position_embeddings = 16 * WIDTH, 4096
    return ModelSource("wide", None, config, {}, mlp=mlp)
