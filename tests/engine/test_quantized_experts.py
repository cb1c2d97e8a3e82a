"""Mixtures of experts whose experts are quantized to 4 bits: log-probs, gradients, memory, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import selected_cases
from support.adapter_grid import Combination, name_of
from support.adapter_results import CLOSE, Oracle, check, outcomes
from support.allocations import Allocations, library
from support.oracle.adapters import dense_base
from support.oracle.wide import wide_maths
from support.split_results import Results
from support.tiny_experts import ARCHITECTURES, make_experts
from torch import Tensor
from transformers import PreTrainedModel

from alignment import KTOConfig
from alignment.models import experts
from alignment.models.quantized import quantized
from alignment.models.source import model_source
from tools.ranks import RankServer

_TRAINED = "test_every_step_matches_peft_on_dequantized_experts"
_WAYS = (("stage0", 1, "unchecked"), ("stage2", 2, "checkpointed"), ("stage2", 1, "reentrant"))


def case(architecture: str, method: str, stage: str, ranks: int, checkpointing: str) -> Combination:
    """Return a case as in ``adapter_grid.py``."""
    return {
        **{"method": method, "kind": "qlora", "stage": stage, "ranks": ranks, "start": "new"},
        **{"checkpointing": checkpointing, "architecture": architecture},
    }


_CLAMPED = ("glm4_moe_lite", "gemma4_text", "deepseek_v3")  # KTO's KL would be 0 in the last step
CASES = [
    *(
        case(name, "CPO" if name in _CLAMPED else "KTO", *_WAYS[number % 3])
        for number, name in enumerate(ARCHITECTURES)
    ),
    *(case("qwen3_moe", "CPO", *way) for way in _WAYS),
    case("gpt_oss", "KTO", "stage0", 2, "reentrant"),
    case("mixtral", "OnlineDPO", "stage2", 2, "unchecked"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The models by architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {name: make_experts(folder / name, name) for name in ARCHITECTURES}


def loaded(path: str, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """Load a model in 4 bits as a run does."""
    args = KTOConfig("out", load_in_4bit=True, use_peft=True, **options)
    source = model_source(path, "model_name_or_path", args)
    source = quantized(source, args, key=path, in_4bit=True, compute=dtype, stage=0)
    return source.load(args, dtype, {}, torch.device("cpu")).eval()


def logps(model: torch.nn.Module) -> Tensor:
    """Return (2, 24, V) log-probs."""
    ids = torch.arange(48).view(2, 24) * 7 % 66
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_are_those_of_dequantized_weights(
    name: str, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the same model in float64, in groups of three experts and of one."""
    expected = logps(dense_base(models[name], classifies=False, bits=4))
    model = loaded(models[name])
    packed = experts.packed_experts(model)
    assert packed and not experts.plain_experts(model)
    for size in (experts.EXPERT_BYTES, 3 * 4 * 64 * 128, 1):
        monkeypatch.setattr(experts, "EXPERT_BYTES", size)
        assert float((logps(model) - expected).abs().max()) < 1e-5


def test_generation(models: dict[str, str]) -> None:
    """With a cache, and one token at a time, greedily."""
    prompts = torch.arange(12).view(2, 6) * 5 % 66
    dense, model = dense_base(models["qwen3_moe"], classifies=False, bits=4), loaded(models["qwen3_moe"])
    found = model.generate(prompts, max_new_tokens=5, do_sample=False, eos_token_id=None)
    ids = prompts
    for _ in range(5):
        with wide_maths():
            ids = torch.cat([ids, dense(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, ids)


def test_memory_while_loading_and_in_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, with 64 experts in each of 3 layers, and compared with unquantized experts and with late quantization.

    While the model is loaded, two copies of one layer's experts exist at most. After the forward pass, nothing is kept
    that is not without quantization; in both passes, the limit is kept.
    """
    width = 128
    path = make_experts(
        tmp_path / "model", "qwen3_moe", num_experts=64, num_experts_per_tok=4, num_hidden_layers=3,
        hidden_size=width, moe_intermediate_size=width,
    )  # fmt: skip
    expert = 2 * width * 2 * width  # bytes of gate_up_proj in bf16
    layer = 64 * 3 * expert // 2
    skipped = {"bnb_4bit_skip_experts": True}
    config = loaded(path, torch.bfloat16).config.quantization_config  # first, so that nothing is cached later
    ids = torch.arange(256).view(4, 64) * 7 % 66
    passes: dict[int, tuple[int, ...]] = {}
    with Allocations(library()).active() as counted:

        def measured(number: int, **options: Any) -> None:
            monkeypatch.setattr(experts, "EXPERT_BYTES", max(1, number) * expert)
            counted.begin()
            counted.peaks.clear()
            with counted.phase("load"):
                model = loaded(path, torch.bfloat16, **options)
            model.requires_grad_(False).enable_input_require_grads()
            counted.begin()
            with counted.phase("forward"):
                loss = model(input_ids=ids, use_cache=False).logits.float().sum()
            with counted.phase("backward"):
                loss.backward()
            passes[number] = (counted.peaks["forward"], counted.peaks["backward"], counted.after["forward"])

        measured(64)
        for number in (8, 1):  # on a CPU, quantizing a group needs ten times its memory
            measured(number)
            assert counted.peaks["load"] <= counted.after["load"] + 2 * layer
        assert counted.after["load"] < layer, "all three layers in 4 bits"
        measured(0, **skipped)
        counted.begin()
        with counted.phase("late"):
            model = loaded(path, torch.bfloat16, **skipped)
            for name, weight in experts.plain_experts(model).items():
                module, _, own = name.rpartition(".")
                setattr(model.get_submodule(module), own, experts.pack(weight.data, config))
        assert min(counted.peaks["load"], counted.peaks["late"]) > 3 * layer
    plain = passes[0]
    for number in (1, 8, 64):
        forward, backward, kept = passes[number]
        assert kept == plain[2]
        assert max(forward - plain[0], backward - plain[1]) <= 1.1 * number * expert
    assert min(passes[64][0] - passes[8][0], passes[64][1] - passes[8][1]) >= 20 * expert, "the limit has an effect"


@pytest.fixture(scope="module")
def found(
    models: dict[str, str], tmp_path_factory: pytest.TempPathFactory, ranks: RankServer, request: pytest.FixtureRequest
) -> Results:
    """Train the runs of the selected tests only."""
    folder = tmp_path_factory.mktemp("trained")
    return outcomes(selected_cases(request, _TRAINED), models, folder / "starts", folder, ranks)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_step_matches_peft_on_dequantized_experts(case: Combination, found: Results, oracle: Oracle) -> None:
    outcome = found[name_of(case)]
    # In fp32, gradients of Gemma 4 have three times the rounding error of others, quantized or not.
    check(outcome, oracle(outcome), 1e-4 if case["architecture"] == "gemma4_text" else CLOSE)
