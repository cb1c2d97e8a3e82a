"""Sequence classifiers as scorers: comparison with transformers' forward pass, new heads, unsupported models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.helpers import make_classifier, make_model, tiny_config, zero
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from alignment import SFTConfig
from alignment.checkpoint.saving import gathered_state_dict
from alignment.config.errors import ModelError, OptionError
from alignment.data.batching import collate, ends
from alignment.engines.launch_env import init_distributed
from alignment.engines.scoring import FrozenEngine, checked
from alignment.models import classifier
from alignment.models.classifier import check_reward_scorer, reward_scorer
from alignment.models.loading import load_model
from alignment.models.source import model_source, read_config
from alignment.models.tasks import CAUSAL_LM, CLASSIFIER, REWARD_MODEL

SMALL: dict[str, Any] = {
    **{"vocab_size": 77, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "max_position_embeddings": 40, "num_labels": 1},
}
DECODERS = {
    "llama": tiny_config("tied"),
    "gemma2": tiny_config("capped"),
    "qwen2": transformers.Qwen2Config(**SMALL, num_key_value_heads=2),
    "gpt2": transformers.GPT2Config(vocab_size=77, n_embd=32, n_layer=2, n_head=4, num_labels=1),
    "opt": transformers.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=16, pad_token_id=None),
    "mixtral": transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4),
}
ENCODERS = {
    "bert": transformers.BertConfig(**SMALL),
    "roberta": transformers.RobertaConfig(**SMALL, pad_token_id=1),
    "deberta": transformers.DebertaV2Config(
        **SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
    ),
}
SEQUENCES = [[3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 1], [1], [13, 14, 15, 16, 17, 1]]


def made(config: Any) -> PreTrainedModel:
    """A random classifier with one label and distinct scores."""
    torch.manual_seed(3)
    config.num_labels = 1
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(4)
    return model


def alone(model: PreTrainedModel, sequences: list[list[int]]) -> Tensor:
    """Return transformers' (S,) scores of each sequence on its own, differentiable."""
    return torch.cat([model(input_ids=torch.tensor([ids])).logits[:, 0] for ids in sequences])


def batched(scorer: Any, sequences: list[list[int]], blocks: bool = False) -> Tensor:
    """Return a scorer's (S,) scores of all sequences in one padded batch."""
    batch = ends(collate([(ids[:-1], ids[-1:]) for ids in sequences], len(sequences)))
    widths = batch.inputs["attention_mask"].sum(1).tolist()
    cut = tuple((1, width) for width in widths) if blocks else ()
    return scorer(batch.inputs, batch.positions, batch.targets, batch.longest, stats=True, blocks=cut).scores


# Scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_scores_last_tokens_as_transformers_does(name: str) -> None:
    model = made(DECODERS[name])
    expected = alone(model, SEQUENCES)
    assert expected.std() > 0.1
    (expected * torch.arange(1, 5)).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    names = list(gradients)
    scorer = reward_scorer(model).eval()
    assert isinstance(scorer, classifier.RewardScorer)
    torch.testing.assert_close(batched(scorer, SEQUENCES, blocks=True), expected, rtol=1e-5, atol=1e-5)
    found = batched(scorer, SEQUENCES)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (found * torch.arange(1, 5)).sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is not None] == names
    for n in names:
        torch.testing.assert_close(model.get_parameter(n).grad, gradients[n], rtol=1e-3, atol=1e-4, msg=n)
    check_reward_scorer(scorer, torch.device("cpu"))


def test_the_end_of_sequence_token_is_scored_even_if_it_is_the_pad_token() -> None:
    model = made(tiny_config("untied"))
    expected = alone(model, SEQUENCES).detach()
    model.config.pad_token_id = model.config.eos_token_id
    theirs = alone(model, SEQUENCES).detach()
    assert abs(theirs[1] - expected[1]) > 0.01, "transformers takes the token before it"
    scorer = reward_scorer(model).eval()
    torch.testing.assert_close(batched(scorer, SEQUENCES).detach(), expected, rtol=1e-5, atol=1e-5)
    check_reward_scorer(scorer, torch.device("cpu"))


def test_scores_of_a_16_bit_model_have_fp32_precision() -> None:
    model = made(tiny_config("untied")).to(torch.bfloat16)
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor([SEQUENCES[1]])).last_hidden_state[0].double()
        exact = (states * model.score.weight.double()).sum(1)[-1:]
        scorer = reward_scorer(model)
        found = batched(scorer, [SEQUENCES[1]])
    assert found.dtype == torch.float32
    assert abs(float(found - exact)) < 1e-5 * float(exact.abs()) < 1 / 256


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_scored_by_its_own_forward_pass(name: str) -> None:
    model = made(ENCODERS[name])
    scorer = reward_scorer(model)
    assert isinstance(scorer, classifier.WholeScorer)
    with torch.no_grad():
        torch.testing.assert_close(batched(scorer, SEQUENCES), alone(model, SEQUENCES), rtol=1e-5, atol=1e-5)
    check_reward_scorer(scorer, torch.device("cpu"))


def test_the_maximum_length_of_a_sequence() -> None:
    longest = {name: classifier.longest_sequence(made(config)) for name, config in (DECODERS | ENCODERS).items()}
    assert longest == {
        **{"llama": 96, "gemma2": 96, "qwen2": 40, "gpt2": 1024, "opt": 40, "mixtral": 40},
        **{"bert": 40, "roberta": 38, "deberta": 40},
    }
    model = made(ENCODERS["roberta"])
    with torch.no_grad():
        alone(model, [[5] * 38])
        with pytest.raises((IndexError, RuntimeError)):
            alone(model, [[5] * 39])


def test_check_detects_a_head_that_is_used_differently() -> None:
    model = made(tiny_config("untied"))
    scorer = reward_scorer(model)
    own = model.score.forward
    model.score.forward = lambda hidden: own(hidden) * (1.0 if hidden.ndim == 2 else 2.0)
    with pytest.raises(ModelError, match="^model LlamaForSequenceClassification .* in an unsupported way"):
        check_reward_scorer(scorer, torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.CTRLConfig(vocab_size=77, n_embd=32, n_layer=1, n_head=4, dff=48), "score a padded batch"),
        (transformers.FNetConfig(**SMALL), "no attention mask"),
    ],
)
def test_a_model_that_cannot_be_batched(config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_reward_scorer(reward_scorer(made(config)), torch.device("cpu"))


# Checkpoints -------------------------------------------------------------------------------------------------------


def look(path: str, task: Any, **kwargs: Any) -> Any:
    return read_config(path, key="k", trust_remote_code=False, task=task, **kwargs)


def test_supported_models_for_scoring_and_training(tmp_path: Path) -> None:
    language, reward = make_model(tmp_path / "language"), make_classifier(tmp_path / "reward")
    many = make_classifier(tmp_path / "many", labels=3)
    made(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path / "bert")
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    assert look(reward, CLASSIFIER).num_labels == look(reward, REWARD_MODEL).num_labels == 1
    assert look(language, REWARD_MODEL).num_labels == 1
    look(str(tmp_path / "bert"), CLASSIFIER)
    with pytest.raises(ModelError, match=r"^k: .* is a LlamaForCausalLM without score\.weight.* reward$"):
        look(language, CLASSIFIER)
    for task in (CLASSIFIER, REWARD_MODEL):
        with pytest.raises(ModelError, match="^k: .*many' has num_labels=3, but a reward model must have 1"):
            look(many, task)
        with pytest.raises(OptionError, match=r"^k: .* with num_labels=2: num_labels must be 1; remove num_labels$"):
            look(language, task, init_kwargs={"num_labels": 2})
    with pytest.raises(ModelError, match=r"is a bert model: BertForSequenceClassification does not score the"):
        look(str(tmp_path / "bert"), REWARD_MODEL)
    with pytest.raises(ModelError, match="is an encoder-decoder model"):
        look(str(tmp_path / "t5"), REWARD_MODEL)
    transformers.ModernBertDecoderConfig(**SMALL, pad_token_id=0).save_pretrained(tmp_path / "decoder")
    with pytest.raises(ModelError, match="does not score the last token"):
        look(str(tmp_path / "decoder"), REWARD_MODEL)


def test_live_models(tmp_path: Path) -> None:
    options = SFTConfig(output_dir=str(tmp_path / "out"))
    language = AutoModelForCausalLM.from_config(tiny_config("tied"))
    for task in (CLASSIFIER, REWARD_MODEL):
        with pytest.raises(ModelError, match="^k: LlamaForCausalLM is not a sequence classifier"):
            model_source(language, "k", options, task=task)
        three = AutoModelForSequenceClassification.from_config(transformers.BertConfig(**{**SMALL, "num_labels": 3}))
        with pytest.raises(ModelError, match="^k: BertForSequenceClassification has num_labels=3"):
            model_source(three, "k", options, task=task)
    two = AutoModelForSequenceClassification.from_config(transformers.Qwen2Config(**{**SMALL, "num_labels": 2}))
    assert model_source(two, "k", options, task=REWARD_MODEL).config.num_labels == 2  # the first one is trained
    bert = made(transformers.BertConfig(**SMALL))
    assert model_source(bert, "k", options, task=CLASSIFIER).live is bert
    with pytest.raises(ModelError, match="can be used for scoring but not trained"):
        model_source(bert, "k", options, task=REWARD_MODEL)


def test_missing_weights_are_detected_for_any_configuration(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_labels": 1}))
    look(path, CLASSIFIER)
    with pytest.raises(ModelError, match=r"no weights for score\.weight; train a reward model with"):
        load_model(path, torch.float32, ds_config=zero(0), task=CLASSIFIER)
    with pytest.raises(ModelError, match=r"no weights for .*layers\.2\.input_layernorm\.weight and 8 more; "):
        more = {"num_hidden_layers": 3}
        load_model(path, torch.float32, ds_config=zero(0), task=REWARD_MODEL, init_kwargs=more)


def test_a_new_head_depends_on_the_seed_but_not_on_partitioning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    init_distributed(use_cpu=False)
    path = make_model(tmp_path / "model", "untied")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    heads = []
    for stage, seed in ((0, 7), (3, 7), (0, 8)):
        torch.manual_seed(stage)
        ds_config = {"train_micro_batch_size_per_gpu": 1, **zero(stage)}
        model = load_model(path, torch.float32, ds_config=ds_config, task=REWARD_MODEL, seed=seed)
        state = gathered_state_dict(model, keep=True)
        heads.append(state["score.weight"])
        assert all(torch.equal(value, stored[name]) for name, value in state.items() if name != "score.weight")
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert 0.01 < float(heads[0].std()) < 0.03
    lines = [line for line in capsys.readouterr().out.splitlines() if "newly initialized" in line]
    assert len(lines) == 3 and lines[0] == f"{path}: the checkpoint has no score.weight; newly initialized with seed 7"
    load_model(path, torch.float32, ds_config=zero(0), task=CAUSAL_LM)
    assert "newly initialized" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["deberta", "llama"])
def test_a_partitioned_engine_scores_as_the_model_does(tmp_path: Path, name: str) -> None:
    init_distributed(use_cpu=False)
    model = made((DECODERS | ENCODERS)[name])
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = alone(model, SEQUENCES)
    ds_config = {"train_micro_batch_size_per_gpu": 1, **zero(3, parameters=True)}
    partitioned = load_model(str(tmp_path / "model"), torch.float32, ds_config=ds_config, task=CLASSIFIER)
    engine = checked(FrozenEngine(CLASSIFIER.scorer(partitioned, False), ds_config), CLASSIFIER)
    batch = ends(collate([(ids[:-1], ids[-1:]) for ids in SEQUENCES], 4))
    with torch.no_grad():
        found, nothing = engine.forward(batch, tokens=True), engine.forward(ends(collate([], 0)))
    torch.testing.assert_close(found.scores, expected, rtol=1e-5, atol=1e-5)
    assert found.token_logps is not None and torch.equal(found.token_logps, found.scores) and len(nothing.scores) == 0
    engine.close()
