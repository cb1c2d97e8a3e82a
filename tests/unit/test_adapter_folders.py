"""Adapters with embeddings of their own, damaged adapter folders, models with new tokens, and adapter references."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora.layer import Linear
from safetensors.torch import save_file
from support.exports import refused
from support.helpers import make_model, tiny_config
from support.tiny_adapters import logps, lora, make_adapter, moved
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, T5Config, T5ForConditionalGeneration

from alignment import KTOConfig
from alignment.checkpoint.export import export
from alignment.config.errors import ModelError, OptionError
from alignment.config.options_export import ExportOptions
from alignment.models import source as source_module
from alignment.models.adapters.folder import read_adapter
from alignment.models.adapters.injection import Given, inject
from alignment.models.adapters.merging import _without_weights
from alignment.models.adapters.plan import plan_adapters
from alignment.models.adapters.record import Adapters
from alignment.models.scorer import CompletionScorer
from alignment.models.source import ModelSource, model_source
from alignment.models.vocabulary import Vocabulary, resize
from alignment.references.adapter import AdapterReference, AdapterReferencePlan
from alignment.references.base import RowIds
from alignment.references.content import adapters_content

CPU, IDS = torch.device("cpu"), torch.arange(24)[None] * 7 % 77


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("base"), "untied")


@pytest.fixture(scope="module")
def grown(base: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An adapter of the base with 128 embeddings, which it contains, and its model."""
    model = AutoModelForCausalLM.from_pretrained(base)
    resize(model, 128)
    model = moved(peft.get_peft_model(model, lora()))
    folder = tmp_path_factory.mktemp("grown")
    model.save_pretrained(folder, save_embedding_layers=True)
    return folder, model


def test_embeddings_of_an_adapter_replace_those_of_its_base(
    base: str, grown: tuple[Path, Any], tmp_path: Path
) -> None:
    export(grown[0], tmp_path / "out", ExportOptions(dtype="float32", samples=0))
    ours, theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), logps(grown[1])
    assert ours.config.vocab_size == 128 and (logps(ours) - theirs).abs().max() < 1e-5
    options = KTOConfig("out", adapter_name_or_path=str(grown[0]))
    with pytest.raises(ModelError, match=r"^adapter_name_or_path: .*contains its own model.embed_tokens.* 128 rows"):
        plan_adapters(options, model_source(base, "model", options))


def test_layers_that_cannot_be_merged(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(layer: Any) -> None:
        raise RuntimeError("no\nreason")

    adapter = make_adapter(tmp_path / "adapter", base, lora(target_modules=["v_proj"]))
    monkeypatch.setattr(Linear, "merge", fails)
    said = "the adapter of model.layers.0.self_attn.v_proj cannot be merged: no"
    refused(ModelError, said, adapter, tmp_path / "out", samples=0)


def test_a_base_is_built_without_its_quantization(base: str, tmp_path: Path) -> None:
    adapter = read_adapter(make_adapter(tmp_path / "adapter", base, lora()))
    config = tiny_config("untied")
    config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    model = _without_weights(adapter, config, False)
    assert {one.device.type for one in model.parameters()} == {"meta"} and model.config.vocab_size == config.vocab_size
    assert not hasattr(model.config, "quantization_config") and config.quantization_config.load_in_4bit
    broken = SimpleNamespace(task=SimpleNamespace(arguments={"a": 1}, auto=None), base="some/base")

    def fails(config: Any, *, trust_remote_code: bool) -> None:
        raise ValueError(f"a={config.a} {trust_remote_code}\nmore")

    broken.task.auto = SimpleNamespace(from_config=fails)
    with pytest.raises(ModelError, match="^base: 'some/base' cannot be built: a=1 True$"):
        _without_weights(broken, config, True)  # type: ignore[arg-type]


def test_damaged_adapter_folders(base: str, tmp_path: Path) -> None:
    made = make_adapter(tmp_path / "adapter", base, lora())
    weights, whole = made / "adapter_model.safetensors", (made / "adapter_model.safetensors").read_bytes()

    def check(file: Path, said: str) -> None:
        with pytest.raises(ModelError, match=f"^{file} {said}") as caught:
            read_adapter(made)
        assert "\n" not in str(caught.value)

    weights.unlink()
    check(weights, "is missing; copy or download the adapter again")
    for size in (5, len(whole) - 1):
        weights.write_bytes(whole[:size])
        check(weights, "is truncated or corrupt .*; copy or download it again")
    for tensors in ({}, {"base_model.model.a": torch.zeros(0, 3), "b": torch.zeros(1)}):
        save_file(tensors, weights)
        check(weights, "has empty tensors; .* ZeRO-3 without gathering them; save the adapter again")
    (made / "adapter_config.json").write_text("{")
    check(made / "adapter_config.json", "cannot be read: ")


def test_the_content_of_adapters(base: str, tmp_path: Path) -> None:
    def of(path: str | None) -> dict[str, Any]:
        return adapters_content(Adapters(lora(), name="own", path=path), tmp_path / "hashes.json")

    made = make_adapter(tmp_path / "adapter", base, lora())
    assert of(None) == {"name": "own"}
    assert sorted(of(str(made))["files"]) == ["adapter_config.json", "adapter_model.safetensors"]
    with pytest.raises(ModelError, match="^'no/adapter': its commit is not in the Hub cache"):
        of("no/adapter")


# New tokens ---------------------------------------------------------------------------------------------------------


def test_a_model_that_knows_new_tokens(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, vocabulary = KTOConfig("out", use_peft=True), Vocabulary(rows=128, new=(77,), eos=77)
    given = model_source(base, "model", options)
    known = given.knowing(vocabulary)
    assert known.vocabulary == vocabulary and (known.config.vocab_size, known.config.eos_token_id) == (128, 77)
    assert (given.config.vocab_size, given.config.eos_token_id) == (77, 1) and given.vocabulary == Vocabulary()
    model = AutoModelForCausalLM.from_pretrained(base)
    live = model_source(model, "model", options).knowing(vocabulary)
    assert (
        live.live is model
        and live.vocabulary == vocabulary
        and (model.vocab_size, model.config.eos_token_id) == (128, 77)
    )
    before = model.get_input_embeddings().weight
    Vocabulary(rows=128).put_on(model)
    assert model.get_input_embeddings().weight is before
    prepared: list[Any] = []
    monkeypatch.setattr(source_module, "prepare_quantized", lambda *args: prepared.append(args))
    quantized: Any = ModelSource(None, model, model.config, {}, quantization="plan")  # type: ignore[arg-type]
    assert quantized.load(options, torch.float32, {}, CPU) is model and prepared == [(model, "plan")]
    other = T5ForConditionalGeneration(T5Config(num_layers=1, d_model=8, d_ff=8, vocab_size=9))
    with pytest.raises(ModelError, match="^k: T5ForConditionalGeneration is an encoder-decoder model"):
        model_source(other, "k", options)


@pytest.mark.parametrize(
    ("config", "saved", "named"),
    [
        ({}, ["embed_tokens", "lm_head"], "embed_tokens and lm_head"),
        ({"target_modules": ["q_proj", "lm_head"]}, ["embed_tokens"], "embed_tokens"),
        ({"target_modules": ".*q_proj", "modules_to_save": ["norm"]}, ["embed_tokens", "lm_head", "norm"], "embed_tokens and lm_head"),
        ({"trainable_token_indices": [77]}, None, None),
    ],
)  # fmt: skip
def test_embeddings_of_new_tokens_are_trained(base: str, config: Any, saved: Any, named: str | None) -> None:
    options = KTOConfig("out", use_peft=True)
    source = model_source(base, "model", options).knowing(Vocabulary(rows=128, new=(77,)))
    made = plan_adapters(options, source, peft_config=lora(**config))
    assert made is not None and made.config.modules_to_save == saved
    found = [note for note in made.notes if note.startswith(f"chat_template_path: {named} are trained in full")]
    assert len(found) == len(made.notes) == (named is not None)


def test_plans_that_are_refused(base: str) -> None:
    options = KTOConfig(base, use_peft=True)
    with pytest.raises(OptionError, match="^output_dir='.*': this folder contains the base model"):
        plan_adapters(options, model_source(base, "model", options))
    live = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora())
    live.peft_config["default"].layer_replication = [(0, 1)]
    options = KTOConfig("out")
    with pytest.raises(OptionError, match="^model: layer_replication.* is not supported; remove it"):
        plan_adapters(options, model_source(live.get_base_model(), "model", options), live=live)


# References ---------------------------------------------------------------------------------------------------------


def policy_of(base: str) -> Any:
    """A policy without an engine, with adapters that change its log-probs."""
    model = AutoModelForCausalLM.from_pretrained(base)
    scorer = CompletionScorer(model).eval()
    inject(model, Adapters(lora(init_lora_weights=False)), ds_config={}, dtype=torch.float32, seed=1)
    steps = torch.arange(23)

    def forward(batch: Any, tokens: bool = False) -> Any:
        scores = scorer({"input_ids": batch}, steps, batch[0, 1:], 23).scores
        return SimpleNamespace(scores=scores.sum()[None], token_logps=scores if tokens else None)

    return SimpleNamespace(scorer=scorer, device=CPU, inference=torch.no_grad, forward=forward)


def test_a_reference_computes_with_the_policy(base: str) -> None:
    policy, ids = policy_of(base), RowIds("", ())
    expected = logps(AutoModelForCausalLM.from_pretrained(base))[0, :-1].gather(1, IDS[0, 1:, None])[:, 0]
    reference = AdapterReference(policy, Given(None))
    for found, wanted in (
        (reference.token_logps(IDS, ids), expected),
        (reference.sequence_logps(IDS, ids), expected.sum()[None]),
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert not found.requires_grad
    own = AdapterReference(policy, Given("default")).token_logps(IDS, ids)
    assert torch.equal(own, policy.forward(IDS, tokens=True).token_logps) and (own - expected).abs().max() > 0.05
    plan = AdapterReferencePlan(Adapters(lora()))
    with pytest.raises(OptionError, match="^ref_placement: adapter: the log-probs of policy and reference differ by"):
        plan.of(policy, Given(None))
    assert plan.of(policy, Given("default")).given == Given("default")
    chosen = AdapterReferencePlan(Adapters(lora(), reference="first"))
    assert chosen.of(policy, Given(None)).given == Given(None), "another adapter may differ"


@pytest.mark.parametrize(
    ("adapters", "given", "said"),
    [
        ({"reference": "first"}, None, "the policy with its adapter 'first', no second model"),
        ({}, None, "initial policy, adapter (adapters disabled, no second model)"),
        ({"path": "x"}, None, "initial policy, adapter (a frozen copy of its adapters, no second model)"),
        ({}, Given("copy"), "initial policy, adapter (a frozen copy of its adapters, no second model)"),
        ({"path": "x"}, Given(None), "initial policy, adapter (adapters disabled, no second model)"),
    ],
)
def test_the_description_of_a_reference(adapters: dict[str, Any], given: Given | None, said: str) -> None:
    assert AdapterReferencePlan(Adapters(lora(), **adapters)).describe(given) == f"reference: {said}"
