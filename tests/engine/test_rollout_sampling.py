"""Options of a rollout: backends, how a request is split, and additional sampling keys.

The effect of a key on a prompt does not depend on the other prompts of the batch.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.drivers.rollout import EOS, PAD, PROMPTS, VOCABULARY, policy_engine, sampling
from support.helpers import make_model, tiny_config
from transformers import AutoModelForCausalLM, DeepseekV3Config, LogitsProcessorList, MambaConfig, PretrainedConfig

from alignment.config.errors import OptionError
from alignment.engines.scoring import PolicyEngine
from alignment.internals.transformers import logits_processors
from alignment.rollout import continuous
from alignment.rollout.backend import Completion, RolloutRequest, Work, chunks
from alignment.rollout.engine import RolloutEngine, choose_backend
from alignment.rollout.generate import _READERS
from alignment.rollout.processors import ACCEPTED, check_generation_kwargs, generation_config

# The last two are refused by transformers.
REFUSED = {
    "top_p": 0.5, "num_beams": 2, "stop_strings": ["."], "no_repeat_ngram": 3, "epsilon_cutoff": 7.0,
    "typical_p": -0.5, "sequence_bias": {"a": 1},
}  # fmt: skip
# A value of each key, and a condition on the resulting completion of the prompt.
WORKS: dict[str, Any] = {
    "min_new_tokens": (6, lambda prompt, ids: len(ids) >= 6),
    "no_repeat_ngram_size": (1, lambda prompt, ids: len({*prompt, *ids}) == len(prompt) + len(ids)),
    "bad_words_ids": ([[token] for token in range(40, 77)], lambda prompt, ids: max(ids) < 40),
    "suppress_tokens": (list(range(40, 77)), lambda prompt, ids: max(ids) < 40),
    "begin_suppress_tokens": (list(range(1, 77)), lambda prompt, ids: ids[0] == 0),
    "forced_eos_token_id": (1, lambda prompt, ids: ids[-1] == 1),
    "exponential_decay_length_penalty": ([2, 1e6], lambda prompt, ids: len(ids) <= 4),
    "sequence_bias": ([[[33], 1000.0]], lambda prompt, ids: set(ids) == {33}),
    "remove_invalid_values": (True, None),
    "renormalize_logits": (True, None),
    "typical_p": (0.5, None),
    "epsilon_cutoff": (1e-4, None),
    "eta_cutoff": (1e-4, None),
    "top_h": (0.5, None),
    "watermarking_config": ({"bias": 2.5, "seeding_scheme": "selfhash"}, None),
}

# Only EOS is likely, unless a processor that reads tokens changes that.
ENDS = {"sequence_bias": [[[EOS], 30.0]]}
# The start of a padded row; every prompt begins with 0.
SEEN = [EOS, 0]
# Each is wrong for a padded prompt if the padding, here mostly the EOS, is read.
READ: dict[str, dict[str, Any]] = {
    "no_repeat_ngram_size": {"extra": {"no_repeat_ngram_size": 1, **ENDS}},
    "longer ngrams": {
        "extra": {"no_repeat_ngram_size": 2, "sequence_bias": [[[PAD], 30.0]]},
        "pad_token_id": PAD,
        "max_new_tokens": 2,
    },
    "bad_words_ids": {"extra": {"bad_words_ids": [[58], *([*SEEN, token] for token in range(2, VOCABULARY))]}},
    "sequence_bias": {"extra": {"sequence_bias": [[[58], -1000.0], [[*SEEN, 33], 1000.0]]}},
    "watermarking_config": {"extra": {"watermarking_config": {"bias": 1e5, "context_width": 4}}},
    "repetition_penalty": {"repetition_penalty": 1000.0, "extra": ENDS},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = policy_engine(make_model(tmp_path_factory.mktemp("model"), "untied"), "stage0")
    yield made
    made.close()


@pytest.mark.parametrize("key", REFUSED)
def test_rejected_keys(key: str) -> None:
    with pytest.raises(OptionError, match=f"^generation_kwargs: {key}="):
        check_generation_kwargs({key: REFUSED[key]})


def test_every_accepted_key_is_tried() -> None:
    assert set(WORKS) == set(ACCEPTED)
    check_generation_kwargs({})


@pytest.mark.parametrize("key", WORKS)
def test_keys_that_shape_the_distribution(policy: Any, key: str) -> None:
    value, holds = WORKS[key]
    check_generation_kwargs({key: value})
    engine = RolloutEngine(policy, "auto", longest_context=64)
    answers = engine.generate(RolloutRequest(PROMPTS, 2, sampling(extra={key: value}), 3))
    for prompt, completions in zip(PROMPTS, answers, strict=True):
        assert all(holds is None or holds(prompt, one.ids) for one in completions), completions
    assert engine.backend.name == "generate"


def bare(config: PretrainedConfig, attention: str = "sdpa") -> Any:
    """A model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def test_choice_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bare(tiny_config("tied"))
    assert choose_backend("auto", model, sampling()).name == "generate"
    cuts = sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)
    assert choose_backend("continuous", model, cuts).name == "continuous"
    assert choose_backend("generate", model, sampling(repetition_penalty=1.2)).name == "generate"
    # On a GPU, the attention implementation decides.
    monkeypatch.setattr(continuous, "device", lambda: torch.device("cuda"))
    assert choose_backend("auto", model, sampling()).name == "generate"
    model.config._attn_implementation = "flash_attention_2"
    assert choose_backend("auto", model, sampling()).name == "continuous"
    assert choose_backend("auto", model, sampling(repetition_penalty=1.2)).name == "generate"


STATE = MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=9)
COMPRESSED = DeepseekV3Config(num_hidden_layers=1, hidden_size=8, vocab_size=9, first_k_dense_replace=1)


@pytest.mark.parametrize(
    "config, more, reason",
    [
        (tiny_config("tied"), {"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor"),
        (tiny_config("tied"), {"extra": {"min_new_tokens": 2}}, "MinNewTokensLengthLogitsProcessor"),
        (tiny_config("capped"), {}, "eager"),
        (STATE, {}, "MambaForCausalLM"),
        (COMPRESSED, {}, "DeepseekV3ForCausalLM"),
        (None, {}, "transformers 5.0.0"),
    ],
    ids=["penalty", "least", "eager", "state", "compressed", "older transformers"],
)
def test_rejected_continuous_batching(
    config: PretrainedConfig | None, more: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if config is None:
        older = SimpleNamespace(__version__="5.0.0", ContinuousBatchingConfig=object)
        monkeypatch.setattr(continuous, "transformers", older)
        config = tiny_config("tied")
    model = bare(config, "eager" if config.model_type in ("gemma2", "mamba") else "sdpa")
    with pytest.raises(OptionError, match=f"^rollout_backend='continuous': .*{reason}"):
        choose_backend("continuous", model, sampling(**more))
    assert choose_backend("auto", model, sampling(**more)).name == "generate"


def test_a_request_is_split_by_completions_longest_prompts_first() -> None:
    request = RolloutRequest([[1], [1, 2, 3], [1, 2], [4]], 3, sampling(), 0)
    divided = [[(work.prompt, work.count) for work in part] for part in chunks(request, 6)]
    assert divided == [[(1, 3), (2, 3)], [(0, 3), (3, 3)]]
    divided = [[(work.prompt, work.count) for work in part] for part in chunks(request, 2)]
    assert divided == [[(1, 2)], [(1, 1)], [(2, 2)], [(2, 1)], [(0, 2)], [(0, 1)], [(3, 2)], [(3, 1)]]
    assert chunks(RolloutRequest([], 2, sampling(), 0), 4) == []
    assert chunks(RolloutRequest([[7]], 2, sampling(), 0), 99) == [[Work(0, [7], 2)]]


def test_a_completion_ends_with_its_first_eos() -> None:
    several = sampling(eos_token_ids=(1, 9))
    assert Completion.cut([5, 2, 9, 2, 1], several) == Completion((5, 2, 9), True)
    assert Completion.cut([5, 2], several) == Completion((5, 2), False)
    assert Completion.cut([5, 1], sampling(eos_token_ids=())).ended is False


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_new_tokens", 3), ("temperature", 0.7), ("top_p", 0.6), ("top_k", 5), ("min_p", 0.2)]
    + [("repetition_penalty", 1.3), ("pad_token_id", 7)],
)
def test_sampling_reaches_transformers(name: str, value: float) -> None:
    """Every field under transformers' name; a wrong name would silently keep its neutral value."""
    neutral = getattr(generation_config(sampling()), name)
    assert getattr(generation_config(sampling(**{name: value})), name) == value != neutral


def test_prompts_that_share_a_page_of_the_cache(policy: Any) -> None:
    """32 tokens are one page: a prompt with one token more than another's page still generates."""
    page = list(range(3, 35))
    engine = RolloutEngine(policy, "continuous", longest_context=64)
    answers = engine.generate(RolloutRequest([[*page, 40], [*page, 41], page], 2, sampling(), 3))
    assert [len(completions) for completions in answers] == [2, 2, 2]
    assert all(one.ids for completions in answers for one in completions)


def rollout(policy: PolicyEngine, batch_size: int, **more: Any) -> list[list[Completion]]:
    """At such a low temperature that sampling is deterministic."""
    engine = RolloutEngine(policy, "generate", batch_size=batch_size, longest_context=64)
    prompts = more.pop("prompts", PROMPTS)
    given = sampling(**{"temperature": 1e-3, "pad_token_id": EOS, **more})
    return engine.generate(RolloutRequest(prompts, 2, given, 5))


@pytest.mark.parametrize("name", READ)
def test_a_batch_gives_the_completions_of_its_single_prompts(policy: PolicyEngine, name: str) -> None:
    together, alone = rollout(policy, 8, **READ[name]), rollout(policy, 1, **READ[name])
    assert together == alone
    assert together != rollout(policy, 8), "the processor should matter"
    assert "_get_logits_processor" not in vars(policy.scorer.model)


def test_prompts_of_one_length_keep_their_own_scores(policy: PolicyEngine) -> None:
    """A processor receives the rows of equal padding together."""
    more = {"prompts": [[0, 5], [0, 9], [0, 31], [0, 7, 8, 9]], "extra": {"no_repeat_ngram_size": 1}}
    together = rollout(policy, 8, **more)
    assert together == rollout(policy, 1, **more) and len({one.ids for both in together for one in both}) == 4


@pytest.mark.parametrize("key", [*ACCEPTED, "repetition_penalty"])
def test_every_processor_that_reads_tokens_is_known(policy: PolicyEngine, key: str) -> None:
    """With tokens before the last changed but not their number, no other processor gives a different result."""
    several = {"repetition_penalty": 2.0, "bad_words_ids": [[EOS, 5]], "sequence_bias": [[[EOS, 5], 9.0]]}
    value = several[key] if key in several else WORKS[key][0]
    more = {key: value} if key == "repetition_penalty" else {"extra": {key: value}}
    config = generation_config(sampling(**more))
    config.max_length = 9
    found = LogitsProcessorList(
        one for one in logits_processors(policy.scorer.model, config) if not isinstance(one, _READERS)
    )
    scores = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0))
    for length in (1, 2, 8):
        first, second = torch.full((1, length), 3), torch.full((1, length), EOS)
        assert torch.equal(found(first, scores.clone()), found(second, scores.clone())), json.dumps({key: length})
