"""Tests of the float64 oracle itself."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import dense, wide
from oracle.dense import CPOOptions, KTOOptions
from oracle.distributions import distribution_metrics
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CPO_ROWS: list[dense.Row] = [
    {"prompt_ids": [1, 5, 9], "chosen_ids": [7, 7, 2], "rejected_ids": [8, 2]},
    {"prompt_ids": [1, 4], "chosen_ids": [11, 2], "rejected_ids": [3, 3, 3, 19, 2]},
]
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 4, "final_logit_softcapping": 2.0}),
    "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 3.0, "attention_multiplier": 0.4}),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.3}),
}


def tiny(family: str = "llama", seed: int = 0, tied: bool = False) -> PreTrainedModel:
    """A random two-layer float32 model."""
    model_class, config_class, more = FAMILIES[family]
    torch.manual_seed(seed)
    return model_class(config_class(**{**SHAPE, **more, "tie_word_embeddings": tied}))


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: float | Tensor, wanted: float, tolerance: float = 1e-9) -> None:
    assert_close(torch.as_tensor(found, dtype=torch.float64), vector(wanted)[0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("path", sorted(Path(dense.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_imports_nothing_of_the_package(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    roots = {name.split(".")[0] for name in imported}
    assert roots <= {"torch", "transformers", "safetensors", "peft", "bitsandbytes", "oracle"} | set(
        sys.stdlib_module_names
    )


def test_kto_clamps_a_negative_estimate_and_omits_an_absent_class() -> None:
    found, metrics = dense.kto_objective(vector(-8.0), vector(-10.0), [True], vector(0.2, -0.5), KTOOptions())
    close(found, 1 - 1 / (1 + math.exp(-0.2)), 1e-15)
    assert metrics["kl"] == 0.0
    assert not {"rewards/rejected", "logps/rejected", "rewards/margins"} & set(metrics)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_is_float64_and_casting_alone_is_not_enough(family: str) -> None:
    model = tiny(family).eval()
    exact = dense.solve(model, CPO_ROWS, CPOOptions())  # raises if any operation, forward or backward, is narrower
    cast = tiny(family).eval().double()
    ids = torch.tensor([[*CPO_ROWS[0]["prompt_ids"], *CPO_ROWS[0]["chosen_ids"]]])
    with torch.no_grad():
        logps = torch.log_softmax(cast(input_ids=ids, use_cache=False).logits[0].double(), -1)
    found = logps[2:5].gather(1, ids[0, 3:, None])[:, 0]
    wanted = vector(*exact.logps["chosen"][0])
    assert_close(found, wanted, rtol=0, atol=1e-4)
    assert float((found - wanted).abs().max()) > 1e-10
    with pytest.raises(TypeError, match="float32"), torch.no_grad(), wide.OnlyFloat64():
        cast(input_ids=ids, use_cache=False)


def test_rotary_frequencies_are_computed_in_float64() -> None:
    found = dict(dense.load(tiny()).named_buffers())["model.rotary_emb.inv_freq"]
    assert_close(found, vector(1.0, 10000.0**-0.5), rtol=0, atol=1e-17)


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere"])
def test_soft_caps_and_scales_are_applied(family: str) -> None:
    policy: Any = dense.load(tiny(family))
    prompt, completion = [1, 5, 9], [7, 30, 2]
    with torch.no_grad(), wide.wide_maths():
        hidden = policy.model(input_ids=torch.tensor([prompt + completion]), use_cache=False).last_hidden_state[0]
        raw = hidden @ policy.lm_head.weight.T
        logits = {"gemma2": 2.0 * torch.tanh(raw / 2.0), "granite": raw / 3.0, "cohere": raw * 0.3}[family]
        wanted = [logits[place + 2, token] - logits[place + 2].logsumexp(0) for place, token in enumerate(completion)]
    assert float((raw - logits).abs().max()) > 0.1
    with torch.no_grad():
        assert_close(dense.token_logps(policy, prompt, completion), torch.stack(wanted), rtol=0, atol=1e-12)


def test_token_logps_chain_cut_and_edges() -> None:
    policy = dense.load(tiny())
    with torch.no_grad():
        whole = dense.token_logps(policy, [1, 5], [7, 9, 2])
        parts = dense.token_logps(policy, [1, 5], [7]), dense.token_logps(policy, [1, 5, 7], [9, 2])
        assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)
        assert_close(dense.token_logps(policy, [1, 5], [7, 9, 2], max_length=4), whole[:2], rtol=0, atol=1e-12)
        assert dense.token_logps(policy, [1, 5], [7, 9], max_length=2).shape == (0,)
        assert dense.token_logps(policy, [1, 5], []).shape == (0,)
        assert_close(dense.token_logps(policy, [], [1, 5]), dense.token_logps(policy, [1], [5]), rtol=0, atol=1e-12)


def test_entropy_of_uniform_predictions() -> None:
    model = dense.load(tiny())
    with torch.no_grad():
        model.lm_head.weight.zero_()
    found = distribution_metrics(model, CPO_ROWS, None)
    close(found["entropy"], math.log(32), 1e-12)
    close(found["objective/entropy"], math.log(32) * (3 + 2 + 2 + 5) / 4, 1e-12)
    assert distribution_metrics(model, CPO_ROWS, 6)["objective/entropy"] < found["objective/entropy"]
