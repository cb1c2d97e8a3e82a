"""Checkpoint validation before loading, loading with DeepSpeed, dropout, gradient checkpointing, snapshots."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.helpers import make_model, tiny_config, zero
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
)
from transformers.integrations import deepspeed as hf_deepspeed

from alignment import KTOConfig
from alignment.checkpoint.saving import gathered_state_dict, write_model
from alignment.config.deepspeed import load_deepspeed_config
from alignment.config.errors import ModelError, OptionError
from alignment.engines.launch_env import init_distributed
from alignment.engines.placement import PLACEMENTS
from alignment.models import loading, source
from alignment.models.loading import disable_dropout, enable_checkpointing, load_model, snapshot
from alignment.models.source import ModelSource, check_weights, model_source, read_config
from alignment.models.tasks import CAUSAL_LM

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
STAGE3 = {"train_micro_batch_size_per_gpu": 1, **zero(3)}


@pytest.fixture(autouse=True)
def no_flag() -> Iterator[None]:
    yield
    hf_deepspeed.unset_hf_deepspeed_config()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(make_model(tmp_path / "model"))


def shard(folder: Path) -> dict[str, str]:
    """Rewrite a model as several files with an index; return tensor name -> file."""
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return dict(index["weight_map"])


def test_a_complete_model_passes(folder: Path) -> None:
    assert read_config(str(folder), key="k", trust_remote_code=False).model_type == "llama"
    assert len(set(shard(folder).values())) > 1
    read_config(str(folder), key="k", trust_remote_code=False)


def test_truncated_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 5, 200, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"^k: .*model\.safetensors is truncated or corrupt"):
            read_config(str(folder), key="k", trust_remote_code=False)


@pytest.mark.parametrize("text", ["", '{"weight_map": {"a": "b', "{}", "[]", '{"weight_map": []}'])
def test_a_corrupt_index(folder: Path, text: str) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"^k: .*model\.safetensors\.index\.json is truncated or corrupt"):
        check_weights(folder, "k")


def test_weights_are_checked_in_the_subfolder(folder: Path) -> None:
    kwargs = {"subfolder": folder.name, "attn_implementation": "eager"}
    config = read_config(str(folder.parent), key="k", trust_remote_code=False, init_kwargs=kwargs)
    assert config.model_type == "llama"


def test_another_task(tmp_path: Path) -> None:
    ViTConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="k: .* is a vit model, which is not a causal language model"):
        read_config(str(tmp_path), key="k", trust_remote_code=False)


def test_a_model_that_cannot_be_loaded(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    for kwargs, said in (({}, "the checkpoint has the shape"), ({"no_such_argument": 1}, "could not be loaded: ")):
        with pytest.raises(ModelError, match=f"^model .* {said}") as caught:
            load_model(str(folder), torch.float32, ds_config=zero(0), init_kwargs=kwargs)
        assert "\n" not in str(caught.value)


SMALL = {"vocab_size": 50, "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 16}
GPT2 = GPT2Config(vocab_size=50, n_embd=16, n_head=2, n_layer=1, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
WITH_DROPOUT = [
    GPT2,
    LlamaConfig(**SMALL, intermediate_size=16, attention_dropout=0.5),
    OPTConfig(**SMALL, ffn_dim=16, word_embed_proj_dim=16, dropout=0.5, attention_dropout=0.5, layerdrop=0.5),
]


@pytest.mark.parametrize("config", WITH_DROPOUT, ids=lambda config: config.model_type)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_all_dropout_is_disabled(config: Any, attention: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    ids = torch.arange(1, 13)[None]
    first, second = (model(input_ids=ids).logits for _ in range(2))
    assert not torch.equal(first, second)
    disable_dropout(model)
    expected = model.eval()(input_ids=ids).logits
    assert all(torch.equal(model.train()(input_ids=ids).logits, expected) for _ in range(8))


def test_dropout_rates_with_any_name() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Dropout2d(0.3), torch.nn.AlphaDropout(0.3))
    names = ("attention_dropout", "attn_dropout_p", "resid_pdrop", "layerdrop", "dropout_rate")
    for name in names:
        setattr(module[0], name, 0.1)
    for name, value in ("drop_last", True), ("scale", 0.5):
        setattr(module, name, value)
    disable_dropout(module)
    assert [part.p for part in module] == [0.0, 0.0, 0.0]
    assert [getattr(module[0], name) for name in names] == [0.0] * 5
    assert vars(module)["drop_last"] is True and vars(module)["scale"] == 0.5


def test_checkpointing_is_not_reentrant_by_default() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("tied"))
    enable_checkpointing(model, None)
    assert model.is_gradient_checkpointing
    layer = model.model.layers[0]
    assert layer._gradient_checkpointing_func.keywords["use_reentrant"] is False
    enable_checkpointing(model, {"use_reentrant": True})
    assert layer._gradient_checkpointing_func.keywords["use_reentrant"] is True
    moe = AutoModelForCausalLM.from_config(tiny_config("moe"))
    with pytest.raises(OptionError, match="drops the gradient of the load-balancing loss"):
        enable_checkpointing(moe, {"use_reentrant": True})
    enable_checkpointing(moe, {})
    moe.supports_gradient_checkpointing = False
    with pytest.raises(OptionError, match="MixtralForCausalLM"):
        enable_checkpointing(moe, None)


@pytest.mark.parametrize(
    ("placement", "stage", "device", "expected"),
    [
        *(("policy", stage, GPU, {"": GPU}) for stage in (0, 1, 2)),
        ("policy", 3, GPU, None),
        ("offloaded optimizer", 2, GPU, {"": GPU}),  # the weights are on the GPU
        ("offloaded parameters", 3, GPU, None),
        ("replica", 0, GPU, {"": GPU}),
        ("sharded", 3, GPU, None),
        ("offload", 3, GPU, None),
        *(("policy", stage, CPU, None) for stage in (0, 2, 3)),
        ("policy", 2, None, None),  # tools that work in host memory
    ],
)
def test_a_model_is_loaded_onto_the_gpu_of_its_rank_unless_it_is_partitioned(
    placement: str, stage: int, device: torch.device | None, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a host would together need many times the model's size of the host's memory."""
    config = zero(stage, optimizer=placement.startswith("offloaded"), parameters=placement == "offloaded parameters")
    if placement in PLACEMENTS:
        config = load_deepspeed_config(None, PLACEMENTS[placement].settings)
        assert config["zero_optimization"]["stage"] == stage
    classes = mock.Mock()
    classes.from_pretrained.side_effect = OSError("nothing to load")
    task = dataclasses.replace(CAUSAL_LM, auto=classes)
    with pytest.raises(ModelError):
        load_model("m", torch.bfloat16, ds_config=config, device=device, task=task)
    given = classes.from_pretrained.call_args.kwargs
    assert given.get("device_map") == expected and given["dtype"] == torch.bfloat16


def test_a_snapshot_shares_nothing(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = snapshot(model)
    assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in model.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.config.vocab_size = 7
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    assert twin.lm_head.weight is twin.model.embed_tokens.weight and twin.config.vocab_size != 7


@pytest.mark.parametrize("kind", ["tied", "untied", "capped"])
def test_a_partitioned_model_is_copied_unpartitioned(tmp_path: Path, kind: str) -> None:
    init_distributed(use_cpu=False)
    path = make_model(tmp_path / kind, kind)
    stored = load_file(tmp_path / kind / "model.safetensors")
    model = load_model(path, torch.float32, ds_config=STAGE3)
    assert all(hasattr(p, "ds_id") for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) < sum(v.numel() for v in stored.values())
    assert gathered_state_dict(model, keep=False) == {}
    state, twin = gathered_state_dict(model, keep=True), snapshot(model)
    write_model(model, None, tmp_path / "written", first_rank=True)
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert all(torch.equal(written[name], stored[name]) for name in stored)
    for name, value in stored.items():
        assert torch.equal(state[name].cpu(), value)
        assert torch.equal(twin.state_dict()[name].cpu(), value)
    assert not any(hasattr(p, "ds_id") for p in twin.parameters())
    whole = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.arange(10)[None]
    assert torch.allclose(twin(input_ids=ids).logits, whole(input_ids=ids).logits, atol=1e-5)
    assert (twin.lm_head.weight is twin.model.embed_tokens.weight) == (kind != "untied")


def test_code_of_a_model_runs_only_with_trust_remote_code(tmp_path: Path) -> None:
    (tmp_path / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    (tmp_path / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass OwnModel(LlamaForCausalLM):\n    pass\n"
    )
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own, "vocab_size": 9}))
    make_model(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="set trust_remote_code: true"):
        read_config(str(tmp_path), key="model_name_or_path", trust_remote_code=False, init_kwargs={})
    config = read_config(str(tmp_path), key="model_name_or_path", trust_remote_code=True, init_kwargs={})
    assert type(config).__name__ == "OwnConfig" and config.vocab_size == 9


def test_live_models_that_need_care(monkeypatch: pytest.MonkeyPatch) -> None:
    t5 = T5ForConditionalGeneration(T5Config(num_layers=1, d_model=8, d_ff=8, vocab_size=9))
    with pytest.raises(ModelError, match="^k: T5ForConditionalGeneration is an encoder-decoder model; only "):
        model_source(t5, "k", KTOConfig("out"))
    prepared = mock.Mock()
    monkeypatch.setattr(source, "prepare_quantized", prepared)
    model: Any = SimpleNamespace(peft_config={"default": None}, parameters=lambda: ["weight"], modules=list)
    packed: Any = ModelSource(None, model, LlamaConfig(), {}, quantization="plan")  # type: ignore[arg-type]
    assert packed.load(KTOConfig("out"), torch.float32, {}, CPU) is model
    prepared.assert_called_once_with(model, "plan")
    monkeypatch.setattr(loading, "is_partitioned", lambda parameter: parameter == "weight")
    with pytest.raises(ModelError, match="^model: a live model with adapters .* cannot be copied as the reference"):
        snapshot(model)


def test_checkpointing_is_enabled_by_the_name_in_the_release() -> None:
    for name in ("gradient_checkpointing_enable", "activation_checkpointing_enable"):
        model = mock.Mock(spec=["supports_gradient_checkpointing", "config", "gradient_checkpointing_enable", name])
        enable_checkpointing(model, {"a": 1})
        getattr(model, name).assert_called_once_with({"use_reentrant": False, "a": 1})
