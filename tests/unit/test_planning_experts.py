"""Plans of mixtures of experts in 4 bits: their weights by arithmetic, and what their product allocates."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.tiny_experts import EXPERTS, experts_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from alignment import KTOConfig
from alignment.models import experts
from alignment.models.quantized import quantized
from alignment.models.source import ModelSource
from alignment.planning.live import live_bytes
from alignment.planning.stand_in import stand_in
from alignment.planning.weights import Weights, weights_of
from tools.documentation.memory_tables import CONFIGURATIONS

TOKENS = 64


def in_4_bits(config: Any, dtype: torch.dtype, **options: Any) -> ModelSource:
    args = KTOConfig("out", load_in_4bit=True, use_peft=True, use_cpu=True, **options)
    return quantized(ModelSource("model", None, config, {}), args, key="model", in_4bit=True, compute=dtype, stage=0)


def weights(model: str, **options: Any) -> Weights:
    """Count a published model in bf16."""
    source = in_4_bits(AutoConfig.from_pretrained(CONFIGURATIONS / model), torch.bfloat16, **options)
    found = weights_of(source, torch.bfloat16)
    assert found is not None
    return found


def test_the_weights_of_a_30b_model_rest_near_17_gb() -> None:
    """48 layers of 128 experts, each 3 matrices of 2048 x 768; 32 heads and 4 for keys and values, of 128."""
    found = weights("Qwen3-30B-A3B")
    stack, attention = 128 * 3 * 2048 * 768, 2 * 2048 * 128 * (32 + 4)
    assert found.packed == 48 * (stack + attention) // 2
    scale = 1 / 64 + 4 / 64 / 256  # nested: a byte per 64 weights, and 4 more per 256 of those
    assert found.constants == pytest.approx(48 * (stack + attention) * scale, rel=1e-3)
    # In bf16: both embeddings, routers, and norms of layers and of heads.
    assert found.plain == 2 * (2 * 151936 * 2048 + 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048)
    assert found.base == pytest.approx(16.7e9, rel=2e-3)
    assert found.read == 2 * 128 * 2 * 2048 * 768, "gate and up of a layer, before and after they are stacked"
    skipped = weights("Qwen3-30B-A3B", bnb_4bit_skip_experts=True)
    assert skipped.base == pytest.approx(found.base + 48 * stack * (2 - 1 / 2 - scale), rel=1e-3)


def test_biases_and_routers_are_not_quantized() -> None:
    """gpt-oss has biases in its experts, routers and attention, and a sink per head."""
    found = weights("gpt-oss-20b")
    attention = 2 * 2880 * 64 * (64 + 8)
    assert found.packed == 24 * (32 * 3 * 2880 * 2880 + attention) // 2
    biases = 32 * (2 * 2880 + 2880) + 64 * (64 + 2 * 8) + 2880
    assert found.plain == 2 * (2 * 201088 * 2880 + 24 * (biases + 32 * (2880 + 1) + 64 + 2 * 2880) + 2880)


def peaks(module: nn.Module, used: int, device: str) -> tuple[int, int]:
    """Return the peaks of the forward and the backward pass if the first experts get all tokens."""
    states = torch.ones(TOKENS, 64, device=device, requires_grad=True)
    index = torch.arange(2 * TOKENS, device=device).view(TOKENS, 2) % used
    scores = torch.full((TOKENS, 2), 0.5, device=device)
    with live_bytes([states, index, scores, *module.parameters()]) as live:
        output = module(states, index, scores)
        forward, live.peak = live.peak, 0
        output.backward(torch.ones_like(output))
    return forward, live.peak


@pytest.mark.parametrize(("used", "limit"), [(1, 1), (EXPERTS, experts.EXPERT_BYTES)])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_the_stand_in_allocates_as_the_product(
    architecture: str, used: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "EXPERT_BYTES", limit)
    source = in_4_bits(experts_config(architecture), torch.float32)
    assert source.quantization is not None
    name = source.quantization.packed_experts[0].rpartition(".")[0]
    planned = stand_in(source, None, torch.float32, 2).model.get_submodule(name)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(source.config)).requires_grad_(False)
    real = model.get_submodule(name)
    for parameter, weight in list(real.named_parameters(recurse=False)):
        if weight.ndim == 3:
            setattr(real, parameter, experts.pack(weight.data, source.quantization.config))
    model.set_experts_implementation(experts.IMPLEMENTATION)
    with torch.device("meta"):
        expected = peaks(planned, used, "meta")
    assert expected == pytest.approx(peaks(real, used, "cpu"), rel=0.02)
