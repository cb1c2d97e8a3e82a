"""Partitioning a full model for ZeRO-3, parameter by parameter, without changing its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters
from peft import LoraConfig, get_peft_model
from support.helpers import STAGES, make_model
from support.operations import Allocations
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from alignment.data.batching import collate
from alignment.engines import scoring
from alignment.engines.launch_env import init_distributed
from alignment.engines.scoring import FrozenEngine
from alignment.internals.deepspeed_zero3 import is_partitioned, whole_bytes
from alignment.models.loading import snapshot
from alignment.models.partitioning import partition_whole
from alignment.models.quantization import Quantization, prepare_quantized
from alignment.models.scorer import CompletionScorer

BATCH = [([0, 5, 9, 11], [3, 40, 8, 8, 21, 1]), ([0, 7], [30, 2, 17])]
RANKS = 4
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    init_distributed(use_cpu=True)
    for kind in ("untied", "tied"):
        make_model(tmp_path_factory.getbasetemp() / kind, kind)
    return tmp_path_factory.getbasetemp()


def config(stage: str = "stage3", bf16: bool = False) -> dict[str, Any]:
    batch = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}
    return {**batch, **STAGES[stage], "bf16": {"enabled": bf16}}


@pytest.fixture
def device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of one of four ranks."""
    accelerator = type(get_accelerator())  # restoring the instance would leave a method that hides the class's
    monkeypatch.setattr(accelerator, "device_name", lambda self, index=None: "cpu:0")
    monkeypatch.setattr(accelerator, "set_device", lambda self, index: None)
    monkeypatch.setattr(partition_parameters.dist, "broadcast", lambda *_, **__: None)
    monkeypatch.setattr(partition_parameters.Init, "_partition_world_size", lambda self, parameter: RANKS)
    return torch.device("cpu:0")


def made(folder: Path, kind: str) -> nn.Module:
    """Return a full model in its scorer: plain, tied, a snapshot, with adapters, or in 4 bits with adapters."""
    source = str(folder / ("tied" if kind == "tied" else "untied"))
    more = {"quantization_config": NF4, "device_map": {"": "cpu"}} if kind == "packed" else {}
    model = AutoModelForCausalLM.from_pretrained(source, **more)
    if kind == "packed":
        prepare_quantized(model, Quantization(NF4, stored=True, repack=torch.float32))
    if kind == "snapshot":
        model = snapshot(model)
    if kind in ("adapters", "packed"):
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False)).get_base_model()
    return CompletionScorer(model)


KINDS = ["plain", "tied", "snapshot", "adapters", "packed"]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_device_holds_its_shard_and_one_parameter(folder: Path, device: torch.device, kind: str, bf16: bool) -> None:
    if kind == "packed" and bf16:
        pytest.skip("4-bit weights are packed in the dtype of the run")
    scorer = made(folder, kind)
    sizes = [p.numel() * (2 if bf16 else p.element_size()) for p in scorer.parameters()]
    tied, buffers = [*scorer.parameters()], sum(b.nbytes for b in scorer.buffers())
    with Allocations() as filled:
        partition_whole(scorer, config(bf16=bf16), device)
    padding = 64 * len(sizes)
    # The parameter itself, and its flattened copy in DeepSpeed.
    assert 0 < filled.peak <= sum(sizes) / RANKS + 2 * max(sizes) + buffers + padding < sum(sizes)
    assert [*map(id, scorer.parameters())] == [*map(id, tied)], "tied parameters and their owners stay"
    assert [whole_bytes(p) for p in scorer.parameters()] == sizes and all(p.numel() == 0 for p in scorer.parameters())


@pytest.mark.parametrize("stage", ["stage3", pytest.param("stage3-offload", marks=pytest.mark.ci)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_gets_a_partitioned_model_with_the_same_scores(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stage: str
) -> None:
    """DeepSpeed would move a full model to the device; the scores are bitwise equal to partitioning there."""
    moved: list[int] = []
    move = nn.Module.to

    def noted(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        moved.append(sum(p.numel() for p in module.parameters()))
        return move(module, *args, **kwargs)

    def scores() -> Tensor:
        scorer = made(folder, kind)
        moved.clear()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(nn.Module, "to", noted)
            engine = FrozenEngine(scorer, config(stage, bf16=kind != "packed"))
        assert all(map(is_partitioned, scorer.parameters()))
        dtypes = {name: buffer.dtype for name, buffer in scorer.named_buffers()}
        assert dtypes and all(dtype == torch.float32 for name, dtype in dtypes.items() if "inv_freq" in name)
        found = engine.forward(collate(BATCH, 20)).scores
        engine.close()
        return found

    found = scores()
    assert moved and not any(moved)
    monkeypatch.setattr(scoring, "partition_whole", lambda *_: None)
    assert torch.equal(scores(), found) and any(moved)


def test_other_models_are_not_partitioned(folder: Path) -> None:
    scorer = made(folder, "plain")
    for stage in ("stage0", "stage2"):
        partition_whole(scorer, config(stage), torch.device("cpu"))
    assert not any(map(is_partitioned, scorer.parameters()))
    partition_whole(scorer, config(), torch.device("cpu"))
    shares = [id(p.ds_tensor) for p in scorer.parameters()]
    partition_whole(scorer, config(bf16=True), torch.device("cpu"))
    assert [id(p.ds_tensor) for p in scorer.parameters()] == shares
