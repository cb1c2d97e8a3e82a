"""Layer kernels: checks before a model is loaded, and patching of loaded models; kernels of SDPA on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.helpers import make_model, options, tiny_config
from torch.backends.cuda import SDPAParams
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    OPTConfig,
)
from transformers.activations import ACT2FN
from transformers.integrations import sdpa_attention

from alignment import KTOConfig, KTOTrainer, OnlineDPOConfig
from alignment.config.errors import ModelError, OptionError
from alignment.engines import scoring
from alignment.internals.liger import kernels_by_type
from alignment.models import attention
from alignment.models import kernels as model_kernels
from alignment.models.kernels import hub_kernels, put_liger_kernels
from alignment.models.loading import load_model
from alignment.models.scorer import CompletionScorer
from alignment.models.source import ModelSource
from alignment.models.tasks import CAUSAL_LM
from alignment.planning import kernels
from alignment.planning.kernels import check_kernels
from alignment.training.run_manifest import compared_options
from tools.architectures.tiny import tiny_config as shrunk


@pytest.fixture(autouse=True)
def plain_modeling_files() -> Iterator[None]:
    """Undo Liger's patch of the rotary embedding, which would run in Triton's interpreter in later tests."""
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models."):
            for key, value in list(vars(module).items()):
                if plain := getattr(value, "__dict__", {}).get("without_liger"):
                    setattr(module, key, plain)


def source(config: Any = None, **init_kwargs: Any) -> ModelSource:
    return ModelSource("some/model", None, config or tiny_config("tied"), init_kwargs)


def check(*sources: ModelSource, **given: Any) -> list[str]:
    return check_kernels(KTOConfig("out", **given), sources or (source(), None))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU for the checks."""
    monkeypatch.setattr(kernels, "has_gpu", lambda: True)


@pytest.mark.usefixtures("gpu")
def test_supported_kernels() -> None:
    assert check(use_liger_kernel=True) == []
    assert check(use_liger_kernel=True, liger_kernel_config={"rope": False, "fused_linear_cross_entropy": False}) == []
    (line,) = check(use_liger_loss=True)
    assert line.startswith("use_liger_loss has no effect: ")


@pytest.mark.parametrize("given", [{"use_liger_kernel": True}, {"model_init_kwargs": {"use_kernels": True}}])
def test_without_a_gpu_nothing_is_loaded(tmp_path: Path, loads: list[Any], given: dict[str, Any]) -> None:
    config = KTOConfig(**options(tmp_path, **given))
    rows = [{"prompt": "a", "completion": "b", "label": True}] * 4
    with pytest.raises(OptionError, match="use_(liger_kernel|kernels)=True: requires a GPU, but this run "):
        KTOTrainer(make_model(tmp_path / "model"), args=config, train_dataset=rows)
    assert loads == []


LIGER: dict[str, Any] = {"use_liger_kernel": True}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rope_embedding": True}, "has no such kernel for a llama model; expected one of rms_norm, rope, swiglu$"),
        ({"swiglue": True}, "liger_kernel_config: swiglue=True: .* did you mean 'swiglu'"),
        ({"cross_entropy": True}, "cross_entropy=True: Liger's losses"),
        ({"fused_linear_cross_entropy": True}, "Liger's losses"),
        ({"rope": "no"}, "rope='no': must be true or false"),
        ({"model": True}, "has no such kernel"),
    ],
)
def test_rejected_kernels(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        check(**LIGER, liger_kernel_config=given)


@pytest.mark.usefixtures("gpu")
def test_an_unsupported_model_type_lists_the_supported_ones() -> None:
    with pytest.raises(OptionError, match="no kernels for some/model, a opt model; ") as caught:
        check(source(), source(OPTConfig()), **LIGER)
    assert all(name in str(caught.value) for name in kernels_by_type())


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("installed", "init_kwargs", "given", "said"),
    [
        (False, {}, LIGER, "liger-kernel is not installed"),
        (False, {"use_kernels": True}, {}, "use_kernels=True: requires a version of the package kernels"),
        (True, {}, {"liger_kernel_config": {"rope": True}}, "no effect without use_liger_kernel"),
        (True, {"use_kernels": True}, LIGER, "and use_liger_kernel replace the same layers"),
        # It replaces layers before the weights are read, with a class that cannot be written to JSON or YAML.
        (True, {"kernel_config": object()}, {}, "kernel_config is not supported"),
    ],
)
def test_kernel_options_that_cannot_be(
    installed: bool, init_kwargs: Any, given: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(kernels, "is_kernels_available", lambda: installed)
    with pytest.raises(OptionError, match=said):
        check(source(), source(**init_kwargs), **given)
    assert not installed or check(source(use_kernels=True)) == []


@pytest.mark.parametrize("live", [False, True])
def test_kernels_are_installed_when_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    put: list[Any] = []
    monkeypatch.setattr(model_kernels, "put_into", lambda model, which: put.append((type(model).__name__, which)))
    path = make_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(path) if live else None
    given = ModelSource(None if live else path, model, tiny_config("tied"), {})

    def load(**more: Any) -> None:
        given.load(KTOConfig("out", **more), torch.float32, {}, torch.device("cpu"))

    load()
    assert put == []
    load(use_liger_kernel=True, liger_kernel_config={"rope": False})
    assert put == [("LlamaForCausalLM", {"rope": False})]


@pytest.mark.parametrize(
    ("model_type", "changes", "layer", "kernel"),
    [
        ("llama", {"hidden_act": "gelu"}, "LigerSwiGLUMLP", "swiglu"),
        ("phi3", {"hidden_act": "relu"}, "LigerPhi3SwiGLUMLP", "swiglu"),
        ("gemma2", {"hidden_activation": "gelu"}, "LigerGEGLUMLP", "geglu"),
        ("nemotron", {"hidden_act": "gelu"}, "LigerReLUSquared", "relu_squared"),
    ],
)
def test_another_activation_is_never_replaced(
    model_type: str, changes: dict[str, Any], layer: str, kernel: str
) -> None:
    """Liger only checks a configuration's activation when it builds a layer; other models are not affected."""
    before = dict(dict.items(ACT2FN))
    own = shrunk(model_type)
    put_liger_kernels(AutoModelForCausalLM.from_config(own), None)
    for name, value in changes.items():
        setattr(own, name, value)
    other = AutoModelForCausalLM.from_config(own)
    with pytest.raises(ModelError, match=f"{layer} computes a different activation than the model's"):
        put_liger_kernels(other, None)
    put_liger_kernels(AutoModelForCausalLM.from_config(own), {kernel: False})
    assert dict(dict.items(ACT2FN)) == before


def test_kernels_of_the_hub_are_selected_for_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not passed to ``from_pretrained``, which would select them in evaluation mode."""
    modes: list[Any] = []
    monkeypatch.setattr(
        LlamaForCausalLM, "set_use_kernels", lambda self, use, config=None: modes.append((self.training, use, config))
    )
    path = make_model(tmp_path)
    modes.clear()
    model = load_model(path, torch.float32, ds_config={}, init_kwargs={"use_kernels": True, "kernel_config": None})
    assert modes == [(False, False, None), (True, True, None)] and not model.training
    load_model(path, torch.float32, ds_config={}, init_kwargs={"use_kernels": False})
    assert modes[2:] == [(False, False, None)]
    assert hub_kernels({"a": 1, "use_kernels": True}) == ({"a": 1}, True)
    assert hub_kernels({"a": 1}) == ({"a": 1}, False)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("model_type", "kernel"), [("deepseek_v3", "rope"), ("glm4", "rope"), ("gpt_oss", "swiglu")])
def test_a_kernel_that_liger_would_ignore_is_refused(model_type: str, kernel: str) -> None:
    """Liger would log a warning and continue, or raise an error after loading the weights."""
    given = source(CONFIG_MAPPING[model_type]())
    assert check(given, use_liger_kernel=True, liger_kernel_config={kernel: False}) == []
    with pytest.raises(OptionError, match=f"{kernel}=True: Liger's kernel does not support {model_type} model"):
        check(given, use_liger_kernel=True, liger_kernel_config={kernel: True})


def test_a_resumed_run_must_use_the_same_kernels() -> None:
    """They round differently from transformers' layers."""
    compared = compared_options(KTOConfig("out", use_liger_kernel=True, liger_kernel_config={"rope": False}))
    assert compared["use_liger_kernel"] is True and compared["liger_kernel_config"] == {"rope": False}
    assert "use_liger_loss" not in compared
    # The length of completions at evaluation may change.
    assert "max_new_tokens" not in compared_options(KTOConfig("out", max_new_tokens=7))
    assert compared_options(OnlineDPOConfig("out", max_new_tokens=7))["max_new_tokens"] == 7


# Which heads each kernel supports, by GPU and dtype, as in torch's sdp_utils.cpp: FlashAttention, the memory-efficient
# one; whether keys are shared; whether a line is printed.
EQUAL_HEADS, ANY_HEADS, NEVER = (lambda grouped: not grouped), (lambda grouped: True), (lambda grouped: False)
HEADS = {
    "Ampere, bf16": (ANY_HEADS, EQUAL_HEADS, True, False),
    "Turing, fp16": (NEVER, EQUAL_HEADS, False, False),
    "fp32": (NEVER, EQUAL_HEADS, False, False),
    "Turing, bf16": (NEVER, NEVER, False, True),
}


@pytest.mark.parametrize("case", HEADS)
def test_grouped_queries_do_not_use_the_math_kernel(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys are expanded where only the math kernel shares them; a line is printed if it is used all the same."""
    flash, efficient, shared, warned = HEADS[case]
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)
    heads: list[tuple[int, int]] = []

    def supported(by: Any) -> Any:
        def can_use(call: SDPAParams) -> bool:
            heads.append((call.query.shape[1], call.key.shape[1]))
            return bool(by(call.enable_gqa))

        return can_use

    monkeypatch.setattr(attention, "can_use_flash_attention", supported(flash))
    monkeypatch.setattr(attention, "can_use_efficient_attention", supported(efficient))
    monkeypatch.setattr(scoring, "settle", lambda *_: None)
    torch.manual_seed(0)
    scorer = CompletionScorer(AutoModelForCausalLM.from_config(tiny_config("tied")))
    engine = mock.Mock(device=torch.device("cuda"), scorer=scorer, partitioned=False)
    task = mock.Mock()
    task.check_scorer.side_effect = lambda scorer, device: CAUSAL_LM.check_scorer(scorer, torch.device("cpu"))
    scoring.checked(engine, task)
    assert ((4, 2) in heads) == shared and ((4, 4) in heads) != shared
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("attention: ")]
    assert len(lines) == warned and all("LlamaForCausalLM in float32" in line for line in lines)


def test_kernels_are_put_into_the_decoder_of_a_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[Any] = []
    monkeypatch.setattr(model_kernels, "put_into", lambda *args: put.append(args))
    classifier = AutoModelForSequenceClassification.from_config(tiny_config("tied", layers=1))
    put_liger_kernels(classifier, {"rope": False})
    assert put == [(classifier.model, {"rope": False})]
