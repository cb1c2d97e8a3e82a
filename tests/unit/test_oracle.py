"""Tests of the float64 oracle itself."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.oracle import dense, wide
from support.oracle.dense import CPOOptions, DPOOptions, KTOOptions
from support.oracle.distributions import distribution_metrics
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
KTO_ROWS: list[dense.Row] = [
    {"prompt_ids": [1, 5, 9], "completion_ids": [7, 7, 2], "label": True, "partner": 2},
    {"prompt_ids": [1, 4], "completion_ids": [11, 3, 8, 2], "label": False, "partner": None},
    {"prompt_ids": [1, 6, 13, 21], "completion_ids": [9, 2], "label": True, "partner": 3},
    {"prompt_ids": [1, 30], "completion_ids": [17, 28, 5, 5, 2], "label": False, "partner": 0},
]
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
    roots = {name.removeprefix("support.").split(".")[0] for name in imported}
    assert roots <= {"torch", "transformers", "safetensors", "peft", "bitsandbytes", "oracle"} | set(
        sys.stdlib_module_names
    )


@pytest.mark.parametrize(("loss_type", "loss"), [("sigmoid", 0.6209570478), ("ipo", 12.25)])
def test_dpo_golden_numbers(loss_type: str, loss: float) -> None:
    options = DPOOptions(loss_type=loss_type, beta=0.1)
    found, metrics = dense.dpo_objective((vector(-12.0), vector(-15.0)), (vector(-13.0), vector(-14.5)), options)
    close(found, loss)
    wanted = {"chosen": 0.1, "rejected": -0.05, "margins": 0.15, "accuracies": 1.0}
    for name, reward in wanted.items():
        close(metrics[f"rewards/{name}"], reward)
    assert (metrics["logps/chosen"], metrics["logps/rejected"]) == (-12.0, -15.0)
    close(metrics["objective/kl"], 0.25)  # log-ratios 1 and -0.5
    close(metrics["objective/non_score_reward"], -0.025)
    # A second pair, for which the policy prefers the wrong completion: margin -3, win probability 0.425557...
    policy, reference = (vector(-12.0, -9.0), vector(-15.0, -4.0)), (vector(-13.0, -8.0), vector(-14.5, -6.0))
    both, metrics = dense.dpo_objective(policy, reference, options)
    second = {"sigmoid": 0.8543552445, "ipo": 64.0}[loss_type]
    close(both, (loss + second) / 2)
    assert metrics["rewards/accuracies"] == 0.5
    close(metrics["objective/kl"], 0.375)


@pytest.mark.parametrize(("method", "tied"), [("kto", True), ("simpo", False), ("dpo", False)])
def test_gradient_against_finite_differences(method: str, tied: bool) -> None:
    model, reference = tiny(tied=tied), dense.load(tiny(seed=1, tied=tied))
    options: KTOOptions | CPOOptions | DPOOptions = {
        "kto": KTOOptions(beta=0.3),
        "simpo": CPOOptions(loss_type="simpo", beta=2.0, label_smoothing=0.1),
        "dpo": DPOOptions(beta=0.3),
    }[method]
    rows = KTO_ROWS if method == "kto" else CPO_ROWS
    step = dense.solve(model, rows, options, None if method == "simpo" else reference)
    policy = dense.load(model)
    sums = {kind: vector(*(sum(one) for one in many)) for kind, many in step.logps.items()}

    def loss() -> float:
        if isinstance(options, CPOOptions):
            return float(dense.cpo_window(policy, rows, options)[0])
        if isinstance(options, DPOOptions):
            return float(dense.dpo_window(policy, reference, rows, options)[0])
        # The KL estimate is a constant for the gradient, so it is fixed at its value before the step.
        own = [dense.token_logps(policy, row["prompt_ids"], row["completion_ids"]).sum() for row in rows]
        labels, mismatched = [row["label"] for row in rows], sums["policy_kl"] - sums["reference_kl"]
        return float(dense.kto_objective(torch.stack(own), sums["reference"], labels, mismatched, options)[0])

    if method == "kto":
        assert step.metrics["kl"] > 0.1
    places: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (7, 3),
        "model.layers.0.self_attn.k_proj.weight": (3, 7),
    }
    places |= {"model.norm.weight": (3,)} if tied else {"lm_head.weight": (2, 9)}
    parameters, width = dict(policy.named_parameters()), 1e-5
    with torch.no_grad():
        for name, place in places.items():
            start = float(parameters[name][place])
            values = []
            for shift in (width, -width):
                parameters[name][place] = start + shift
                values.append(loss())
            parameters[name][place] = start
            slope = (values[0] - values[1]) / (2 * width)
            assert abs(slope) > 1e-5, f"{name}{place} tests nothing"
            assert_close(vector(slope)[0], step.gradients[name][place], rtol=1e-6, atol=1e-9)


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
