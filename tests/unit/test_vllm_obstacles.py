"""What a vLLM server cannot take from the policy, by name and with what to set instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import IA3Config, LoraConfig
from transformers import BitsAndBytesConfig, LlamaConfig

from alignment.models.adapters.record import Adapters
from alignment.models.quantization import Quantization
from alignment.models.source import ModelSource
from alignment.models.vocabulary import Vocabulary
from alignment.rollout.vllm import weights
from alignment.rollout.vllm.support import adapter_obstacle, base_obstacle, server_obstacle

LORA = LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
INSIDE = ("model.layers.0.self_attn.q_proj",)


def adapters(**settings: Any) -> Adapters:
    """LoRA of one layer with these settings."""
    return Adapters(LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **settings), layers=INSIDE)


def source(config: Any = None, **more: Any) -> ModelSource:
    return ModelSource("model", None, config or LlamaConfig(), {}, **more)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 4}, "lora_dropout": 0.1},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
    ],
)
def test_adapters_that_vllm_computes_as_peft(settings: dict[str, Any]) -> None:
    assert adapter_obstacle(adapters(**settings)) is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (adapters(use_dora=True), "use_dora"),
        (adapters(lora_bias=True), "lora_bias"),
        (adapters(bias="lora_only"), "bias"),
        (adapters(modules_to_save=["lm_head"]), "modules_to_save"),
        (adapters(trainable_token_indices=[5]), "trainable_token_indices"),
        (adapters(target_parameters=["mlp.experts.down_proj"]), "target_parameters"),
        (adapters(init_lora_weights="pissa"), "init_lora_weights"),
        (Adapters(IA3Config(target_modules=["q_proj"], feedforward_modules=[]), layers=INSIDE), "IA3"),
        (replace(adapters(), layers=(*INSIDE, "lm_head")), "lm_head"),
        (replace(adapters(), embeddings=True), "embeddings"),
    ],
)
def test_adapters_that_vllm_does_not_load(given: Adapters, named: str) -> None:
    obstacle = adapter_obstacle(given)
    assert obstacle is not None and named in obstacle


def test_a_server_of_the_checkpoint_has_not_the_policys_base() -> None:
    own = Adapters(LORA)
    quantized = source(quantization=Quantization(BitsAndBytesConfig(load_in_4bit=True)))
    grown = source(vocabulary=Vocabulary(rows=64))
    for model, trained, named in (
        (quantized, own, "vllm_allow_base_mismatch"),
        (source(merged=True), own, "merged"),
        (grown, own, "chat_template_path"),
        (grown, None, "chat_template_path"),
    ):
        obstacle = base_obstacle(model, trained, allow_mismatch=False)
        assert obstacle is not None and named in obstacle
    assert base_obstacle(source(), own, allow_mismatch=False) is None
    assert base_obstacle(source(merged=True), None, allow_mismatch=False) is None, "all weights are sent"
    assert base_obstacle(quantized, own, allow_mismatch=True) is None
    assert base_obstacle(grown, own, allow_mismatch=True) is not None


def test_a_server_that_cannot_take_the_weights() -> None:
    on_cpu = {"device_config": {"device": "cpu"}, "lora_config": {"max_lora_rank": 8}}
    on_gpu = on_cpu | {"device_config": {"device": "cuda"}, "lora_config": None}
    assert server_obstacle(Adapters(LORA), on_cpu) is None
    for found in (
        server_obstacle(adapters(r=8, rank_pattern={"q_proj": 16}), on_cpu),
        server_obstacle(Adapters(LORA), on_gpu),
    ):
        assert found is not None and "--max-lora-rank" in found
    assert server_obstacle(None, on_cpu) is None


def test_files_are_in_memory_if_twice_their_size_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MEMORY", tmp_path)
    monkeypatch.setattr(weights.tempfile, "gettempdir", lambda: "elsewhere")
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100})())
    assert weights._memory(49) == tmp_path and weights._memory(50) == Path("elsewhere")
    monkeypatch.setattr(weights, "MEMORY", tmp_path / "missing")
    assert weights._memory(1) == Path("elsewhere")
