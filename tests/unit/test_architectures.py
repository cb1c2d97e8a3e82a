"""Types of causal language models with unusual logits: exact, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertGenerationConfig, PreTrainedModel, XLMConfig

from alignment.config.errors import ModelError, OptionError
from alignment.models.architectures import REFUSED
from alignment.models.checking import _head_rounding, check_scorer
from alignment.models.head import LogProbHead, logit_transform
from alignment.models.logprobs import LogitTransform
from alignment.models.scorer import CompletionScorer
from alignment.models.source import read_config
from alignment.rollout.memory import completion_bytes
from tools.architectures.comparison import examine, types
from tools.architectures.tiny import TRANSFORMS, tiny_config, tiny_model
from tools.documentation.page import REFERENCE

CPU = torch.device("cpu")
PAGE = REFERENCE / "architectures.md"
# Logits scaled or capped by other names, hidden states elsewhere, configurations that differ by layer.
SAMPLE = ("gemma3n_text", "gemma4_text", "llama4", "mpt", "recurrent_gemma", "xlstm")
CAPPED = {"gemma2": "final_logit_softcapping", "recurrent_gemma": "logits_soft_cap", "xlstm": "output_logit_soft_cap"}


@pytest.mark.parametrize("model_type", SAMPLE)
def test_log_probs_and_gradients_are_those_of_the_models_own_logits(model_type: str) -> None:
    result = examine(model_type)
    assert result.exact, result.row


@pytest.mark.slow
@pytest.mark.parametrize("model_type", types())
def test_every_type_is_exact_or_refused_with_a_reason(model_type: str) -> None:
    result = examine(model_type)
    assert result.good, result.row
    written = PAGE.read_text(encoding="utf-8")
    word = "exact" if result.exact else "refused"
    assert f"| {model_type} | {types()[model_type]} | {word} |" in written, "run python -m tools.architectures"


def test_the_page_has_every_type() -> None:
    written = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line.split(" ")[1] for line in written if line.startswith("| ") and " class " not in line] == list(types())


def model_with_cap(model_type: str, cap: float, gain: float) -> PreTrainedModel:
    """A model whose logits have a magnitude of ``gain`` and are capped at ``cap``."""
    config = tiny_config(model_type)
    setattr(config, CAPPED[model_type], cap)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
    return model


def check_cap(model: PreTrainedModel, scorer: CompletionScorer, cap: float) -> None:
    """Check that the model passes, and that it is refused with a head that does not apply the cap."""
    check_scorer(scorer, CPU)
    head = model.get_output_embeddings()
    assert isinstance(head, LogProbHead) and head.transform.softcap == cap
    head.transform = LogitTransform()
    with pytest.raises(ModelError, match=rf"\({model.config.model_type}\) computes its logits in an unsupported way"):
        check_scorer(scorer, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", CAPPED)
def test_the_check_detects_a_missing_cap(model_type: str, dtype: torch.dtype) -> None:
    """With the cap, the same model passes, including rounding."""
    # Caps are about as large as the logits, however small these are: an absolute tolerance would accept all of them.
    model = model_with_cap(model_type, 1.0, 1.0).to(dtype)
    size = float(model(input_ids=torch.arange(2, 10)[None], use_cache=False).logits.detach().abs().max())
    assert size < 1.0
    model.config.__dict__[CAPPED[model_type]] = size / 2
    check_cap(model, CompletionScorer(model), size / 2)


def test_the_check_detects_a_cap_of_thirty_with_small_logits() -> None:
    """It changes logits of about 3 by 0.01, less than a former absolute tolerance."""
    model = model_with_cap("recurrent_gemma", 30.0, 3.0)
    check_cap(model, CompletionScorer(model), 30.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "granite", "mixtral"])
def test_rounding_passes_the_check(model_type: str, dtype: torch.dtype) -> None:
    for seed in range(3):
        check_scorer(CompletionScorer(tiny_model(model_type, seed).to(dtype)), CPU)


@pytest.mark.parametrize("gain", [0.0, 1e-4])
def test_tiny_logits_pass_the_check(gain: float) -> None:
    """Also a zero head: its log-probs are the negative logarithm of the vocabulary size, with rounding."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(gain)
    check_scorer(CompletionScorer(model), CPU)


def test_an_error_of_the_head_is_not_reported_as_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNMENT_HEAD_TILES", "tritn")
    with pytest.raises(OptionError, match="^ALIGNMENT_HEAD_TILES=tritn: expected one of"):
        check_scorer(CompletionScorer(tiny_model("llama")), CPU)


def test_tf32_enabled_by_torchs_newer_setting() -> None:
    """Reading the older one, ``allow_tf32``, then raises an error."""
    settings: Any = torch.backends.cuda.matmul
    if not hasattr(settings, "fp32_precision"):
        pytest.skip("added in torch 2.9")
    settings.fp32_precision = "tf32"
    try:
        assert _head_rounding(False, torch.device("cuda")) > 2**-11
    finally:
        settings.allow_tf32 = False  # sets both


def test_a_model_without_causal_attention_is_refused() -> None:
    torch.manual_seed(0)  # a model with weak attention: logits change by a thousandth of the largest
    config = XLMConfig(vocab_size=97, emb_dim=32, n_layers=1, n_heads=4, max_position_embeddings=64)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"XLMWithLMHeadModel \(xlm\) is not causal: its logits change by "):
        check_scorer(CompletionScorer(model), CPU)
    config.causal = True
    check_scorer(CompletionScorer(AutoModelForCausalLM.from_config(config)), CPU)


@pytest.mark.parametrize("model_type", ["bert", "xlnet", "reformer"])
def test_a_type_is_refused_before_weights_are_checked(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelError, match=f"is a {model_type} model, which is not supported: ") as caught:
        read_config(str(tmp_path), key="model_name_or_path", trust_remote_code=False)
    assert str(caught.value).endswith(REFUSED[model_type])


def test_an_encoder_is_refused_unless_it_is_a_decoder(tmp_path: Path) -> None:
    config = BertGenerationConfig(is_decoder=False)
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="set is_decoder: true in its config.json"):
        read_config(str(tmp_path), key="model_name_or_path", trust_remote_code=False)
    assert examine("bert-generation").exact


@pytest.mark.parametrize(
    ("model_type", "value", "scale"),
    [("mpt", "inv_sqrt_d_model", 1.0), ("cohere", 0.3, 0.3), ("granite", 4.0, 0.25), ("hyperclovax", 4.0, 4.0),
     ("inkling_text", 4.0, 0.25)],
)  # fmt: skip
def test_scales(model_type: str, value: Any, scale: float) -> None:
    config = tiny_config(model_type)
    for name in TRANSFORMS.keys() & config.to_dict().keys() - {"final_logit_softcapping"}:
        setattr(config, name, value)
    assert logit_transform(config).scale == pytest.approx(scale)


def test_memory_of_a_completion_if_layers_differ() -> None:
    """Gemma 4's last layer has heads of another size; Gemma 3n's layers have different widths."""
    gemma4, gemma3n = tiny_model("gemma4_text"), tiny_config("gemma3n_text")
    heads = [layer.head_dim for layer in gemma4.config.per_layer_config]
    assert heads == [8, 8, 8, 16]
    vectors = 6 * 128 * 4
    assert completion_bytes(gemma4.config, 4, 10) == 10 * 4 * (2 * 2 * sum(heads) + 6 * 32 + 3 * 64) + vectors
    gemma3n.intermediate_size = [64, 64, 96, 64]
    model = AutoModelForCausalLM.from_config(gemma3n, dtype=torch.float32)
    assert completion_bytes(model.config, 4, 10) == 10 * 4 * (4 * 2 * 2 * 8 + 6 * 32 + 3 * 96) + vectors


def test_the_check_detects_a_cap_with_a_small_effect() -> None:
    """It only changes the least likely token, which neither affects a sum of probabilities nor is a next token."""
    model = tiny_model("gemma2")
    model.config.final_logit_softcapping = 30.0
    scorer = CompletionScorer(model)
    head, norm = model.get_output_embeddings(), model.model.norm
    assert isinstance(head, LogProbHead)
    own = norm.forward
    norm.forward = lambda hidden: torch.cat([torch.full_like(hidden[..., :1], 10.0), own(hidden)[..., 1:]], -1)
    with torch.no_grad():
        head.weight[:, 0] = 0.0
        head.weight[127] = 0.0
        head.weight[127, 0] = -6.0
    check_cap(model.to(torch.bfloat16), scorer, 30.0)
