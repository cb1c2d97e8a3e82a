"""A reward model as a source of rewards: order, batches, truncation, templates, and errors."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.data_tokenizers import PLAIN, TOOLS, char_tokenizer
from support.helpers import make_classifier, zero
from transformers import AutoModelForSequenceClassification

from alignment import OnlineDPOConfig
from alignment.config.dtypes import plan_dtypes
from alignment.config.errors import DataError, ModelError, OptionError, RewardError
from alignment.engines.launch_env import init_distributed
from alignment.online.ranking import RewardRanker
from alignment.online.resources import OnlineResources
from alignment.rewards.reward_model import ClassifierReward
from alignment.rewards.samples import Samples, spoken

TOOL = {"type": "function", "function": {"name": "clock"}}


def samples(prompts: list[Any], texts: list[str], template: dict[str, Any] | None = None) -> Samples:
    size = len(prompts)
    completions = [spoken(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    places = [f"rows.jsonl, row {n + 1}" for n in range(size)]
    return Samples(prompts, completions, [[]] * size, [True] * size, {}, places, [template or {}] * size)


def source(model: Any, folder: Path, tokenizer: Any = None, **more: Any) -> ClassifierReward:
    init_distributed(use_cpu=False)
    options = OnlineDPOConfig(output_dir=str(folder), per_device_train_batch_size=1)
    return ClassifierReward(model, tokenizer, options=options, dtypes=plan_dtypes(options, zero(0)), **more)


@torch.no_grad()
def own_scores(path: str, texts: list[str], tokenizer: Any) -> list[float]:
    """transformers' score of each text by itself; the texts contain their special tokens."""
    model = AutoModelForSequenceClassification.from_pretrained(path)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [float(model(input_ids=torch.tensor([one])).logits[0, 0]) for one in ids]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_classifier(tmp_path_factory.mktemp("models") / "reward", "untied", seed=1)


PROMPTS, TEXTS = ["once ", "ab", "a long prompt, ", "", "x"], ["upon a time", "b", "with an answer", "yes", "y" * 40]


@pytest.mark.parametrize(("placement", "batch_size"), [(None, None), ("sharded", 3), ("offload", 1), ("replica", 9)])
def test_scores_match_the_saved_model_in_order(path: str, tmp_path: Path, placement: Any, batch_size: Any) -> None:
    reward = source(path, tmp_path, placement=placement, batch_size=batch_size)
    lives = reward.frozen.placement.name
    assert lives == (placement or "replica")
    assert reward.describe() == f"reward model: {path}, {lives}, batch size {batch_size or 2}"
    tokenizer = char_tokenizer()
    expected = own_scores(path, [f"{p}{t}</s>" for p, t in zip(PROMPTS, TEXTS)], tokenizer)
    found = reward.score(samples(PROMPTS, TEXTS))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4) and len({round(s, 3) for s in expected}) == 5
    assert reward.truncated == 0
    cut = dataclasses.replace(samples(PROMPTS, TEXTS), ended=[False] * 5)  # scored as if they had ended
    assert reward.score(cut) == found
    assert reward.score(samples([], [])) == []
    reward.close()
    if placement == "sharded":
        assert reward.score(samples(PROMPTS[:1], TEXTS[:1])) == pytest.approx(expected[:1], rel=1e-4)
        reward.close()


@pytest.mark.parametrize("pack", [True, False])
def test_completions_of_a_row_share_its_prompt(path: str, tmp_path: Path, pack: bool) -> None:
    """Also if they are not next to each other."""
    init_distributed(use_cpu=False)
    options = OnlineDPOConfig(output_dir=str(tmp_path), pack=pack)
    reward = ClassifierReward(path, options=options, dtypes=plan_dtypes(options, zero(0)), batch_size=6)
    given = samples(PROMPTS[:3] * 2, TEXTS[:3] + TEXTS[3:] + [""])
    given = dataclasses.replace(given, places=given.places[:3] * 2)
    texts = [f"{prompt}{text}</s>" for prompt, text in zip(given.prompts, given.completions)]
    shapes: list[Any] = []
    model = reward.build().scorer.model.model
    model.register_forward_pre_hook(lambda _, args, given: shapes.append(given["input_ids"].shape), with_kwargs=True)
    assert reward.score(given) == pytest.approx(own_scores(path, texts, char_tokenizer()), rel=1e-4, abs=1e-4)
    ids = [char_tokenizer()(text, add_special_tokens=False)["input_ids"] for text in texts]
    shared = [len(os.path.commonprefix(pair)) for pair in zip(ids[:3], ids[3:])]
    if pack:
        assert all(shared) and shapes == [(1, sum(map(len, ids)) - sum(shared))]
    else:
        assert sum(rows for rows, _ in shapes) == 6
    reward.close()


def test_a_live_model_is_unchanged_afterwards(path: str, tmp_path: Path) -> None:
    live = AutoModelForSequenceClassification.from_pretrained(path)
    weights = {name: value.clone() for name, value in live.state_dict().items()}
    reward = source(live, tmp_path, char_tokenizer())
    expected = own_scores(path, ["once upon</s>"], char_tokenizer())
    assert reward.score(samples(["once "], ["upon"])) == pytest.approx(expected, rel=1e-4)
    assert not any(p.requires_grad for p in live.parameters())
    reward.close()
    assert all(p.requires_grad for p in live.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in live.state_dict().items())


def test_conversations_use_its_own_template(path: str, tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "what time is it"}]
    tokenizer = char_tokenizer(template=TOOLS)
    reward = source(path, tmp_path, tokenizer)
    messages: Any = [*prompt, *spoken(prompt, "late")]
    given = tokenizer.apply_chat_template(messages, tools=[TOOL], return_dict=True, return_tensors="pt")
    rendered = tokenizer.decode(given["input_ids"][0])
    assert "clock" in rendered and rendered.endswith("late<|im_end|>\n")  # the template's last token follows it
    with torch.no_grad():
        by_the_card = AutoModelForSequenceClassification.from_pretrained(path)(**given).logits[0].tolist()
    reward.check(prompt, "row 1", {"tools": [TOOL]})
    found = reward.score(samples([prompt], ["late"], {"tools": [TOOL]}))
    assert found == pytest.approx(by_the_card, rel=1e-5)
    assert found != pytest.approx(reward.score(samples([prompt], ["late"])), rel=1e-4)
    reward.close()


def test_a_completion_that_continues_the_prompt_is_one_turn(path: str, tmp_path: Path) -> None:
    tokenizer = char_tokenizer(template=TOOLS)
    reward = source(path, tmp_path, tokenizer)
    start: list[Any] = [{"role": "user", "content": "what time"}, {"role": "assistant", "content": "it is"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "clock"}}]}
    prompts = [start, [*start[:1], call], start[1:]]
    texts = [
        "<|im_start|>user\nwhat time<|im_end|>\n<|im_start|>assistant\nit is late<|im_end|>\n",
        tokenizer.apply_chat_template([start[0], call, *spoken(start, " late")], tokenize=False),
        "<|im_start|>assistant\nit is late<|im_end|>\n",
    ]
    found = reward.score(samples(prompts, [" late"] * 3))
    assert found == pytest.approx(own_scores(path, texts, tokenizer), rel=1e-5)
    reward.check(start, "row 1", {})
    reward.close()


def test_a_model_that_is_passed_twice_counts_once(path: str, tmp_path: Path) -> None:

    def brief(completions: list[str]) -> list[float]:
        return [-len(text) for text in completions]

    options = OnlineDPOConfig(output_dir=str(tmp_path / "out"), reward_model_path=path, reward_weights=[1.0, 2.0])
    given = [brief, path]  # the weights are in the order of the sources
    resources = OnlineResources(options, source(path, tmp_path).dtypes, 0, reward_funcs=given)
    assert isinstance(resources.ranker, RewardRanker)
    assert resources.ranker.rewards.names == ["brief", "reward_model"] and len(resources.classifiers) == 1


def test_the_first_of_two_labels_is_the_score(tmp_path: Path) -> None:
    path = make_classifier(tmp_path / "two", seed=1, labels=2)
    reward = source(path, tmp_path)
    assert reward.describe().endswith("the score is the logit of the first of its 2 labels")
    found = reward.score(samples(["once "], ["upon"]))
    assert found == pytest.approx(own_scores(path, ["once upon</s>"], char_tokenizer(template=PLAIN)), rel=1e-4)
    reward.close()


def test_long_sequences_are_truncated_on_the_right_and_counted(path: str, tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    for limit, longest in ((None, 96), (20, 20), (1000, 96)):
        if limit is not None:
            tokenizer.model_max_length = limit
        reward = source(path, tmp_path, tokenizer)
        text = "cdefghijkl" * 12
        expected = own_scores(path, [text[:longest], "cde</s>"], tokenizer)
        assert reward.score(samples([text[:7], "c"], [text[7:], "de"])) == pytest.approx(expected, rel=1e-4)
        assert reward.truncated == 1
        reward.score(samples(["c"], [text[: longest - 2]]))
        assert reward.truncated == 0
        reward.close()


def test_a_score_that_is_not_finite_names_model_and_row(path: str, tmp_path: Path) -> None:
    live = AutoModelForSequenceClassification.from_pretrained(path)
    reward = source(live, tmp_path, char_tokenizer(eos=None))
    assert reward.score(samples(["", "a"], ["", "b"]))[0] is None, "without tokens"
    torch.nn.init.constant_(live.score.weight, float("nan"))
    with pytest.raises(RewardError, match=r"^reward model .*reward: .*rows\.jsonl, row 1 is nan"):
        reward.score(samples(["a", "c"], ["b", "d"]))
    reward.close()


def test_errors_before_anything_is_loaded(path: str, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    reward = source(path, tmp_path, char_tokenizer())
    reward.check("hello", "rows.jsonl, row 1", {})
    with pytest.raises(ModelError, match=r"^reward_processing_class: rows\.jsonl, row 1"):
        reward.check(chat, "rows.jsonl, row 1", {})
    failing = source(path, tmp_path, char_tokenizer(template="{{ raise_exception('no users') }}"))
    with pytest.raises(DataError, match=r"^rows\.jsonl, row 1: the chat template .* failed: no users"):
        failing.check(chat, "rows.jsonl, row 1", {})
    picky = char_tokenizer(template="{% if not tools %}{{ raise_exception('no tools') }}{% endif %}" + PLAIN)
    source(path, tmp_path, picky).check(chat, "rows.jsonl, row 1", {"tools": [TOOL]})
    with pytest.raises(RewardError, match=r"^reward model .*: rows\.jsonl, row 1: the chat template .* failed"):
        failing.score(samples([chat], ["hi"]))
    failing.close()
    merges = char_tokenizer(template=PLAIN, merges=(("a", "b"), ("c", "d"), ("e", "f")))
    for tokenizer, said in (
        (3, "reward_processing_class: int "),
        (merges, "the tokenizer .*reward's vocab_size is 77"),
    ):
        with pytest.raises(ModelError, match=f"^{said}"):
            source(path, tmp_path, tokenizer)


def test_its_engine_is_configured_separately_from_the_policys(path: str, tmp_path: Path) -> None:
    mapping = zero(3, parameters=True)
    reward = source(path, tmp_path, deepspeed=mapping, batch_size=5)
    assert reward.frozen.placement.name == "offload"
    assert reward.frozen.ds_config["zero_optimization"]["stage"] == 3
    assert reward.frozen.ds_config["train_micro_batch_size_per_gpu"] == 5
    with pytest.raises(OptionError, match="^DeepSpeed mapping: .*'offload'.* contradicts reward_placement='replica'"):
        source(path, tmp_path, deepspeed=mapping, placement="replica")
    with pytest.raises(OptionError, match="zero_optimization.stage=2: a frozen model requires stage 3"):
        source(path, tmp_path, deepspeed=zero(2))
