"""Processors that read tokens: their effect on a prompt does not depend on the other prompts of the batch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from drivers.rollout import EOS, PAD, PROMPTS, VOCABULARY, policy_engine, sampling
from helpers import make_model
from transformers import LogitsProcessorList

from alignment.engines.scoring import PolicyEngine
from alignment.internals.transformers import logits_processors
from alignment.rollout.backend import Completion, RolloutRequest
from alignment.rollout.engine import RolloutEngine
from alignment.rollout.generate import _READERS
from alignment.rollout.processors import ACCEPTED, generation_config

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


def rollout(policy: PolicyEngine, batch_size: int, **more: Any) -> list[list[Completion]]:
    """At such a low temperature that sampling is deterministic."""
    engine = RolloutEngine(policy, "generate", batch_size=batch_size, longest_context=64)
    prompts = more.pop("prompts", PROMPTS)
    given = sampling(**{"temperature": 1e-3, "pad_token_id": EOS, **more})
    return engine.generate(RolloutRequest(prompts, 2, given, 5))


@pytest.mark.parametrize("name", READ)
def test_a_batch_gives_the_completions_of_its_single_prompts(policy: PolicyEngine, name: str) -> None:
    together, alone = rollout(policy, 8, **READ[name]), rollout(policy, 1, **READ[name])
    assert [[one.ids for one in both] for both in together] == [[one.ids for one in both] for both in alone]
    assert together != rollout(policy, 8), "the processor should matter"
    assert "_get_logits_processor" not in vars(policy.scorer.model)


def test_prompts_of_one_length_keep_their_own_scores(policy: PolicyEngine) -> None:
    """A processor receives the rows of equal padding together."""
    more = {"prompts": [[0, 5], [0, 9], [0, 31], [0, 7, 8, 9]], "extra": {"no_repeat_ngram_size": 1}}
    together, alone = (rollout(policy, size, **more) for size in (8, 1))
    assert [[one.ids for one in both] for both in together] == [[one.ids for one in both] for both in alone]
    assert len({one.ids for both in together for one in both}) == 4


def test_the_end_can_be_sampled_once(policy: PolicyEngine) -> None:
    answers = rollout(policy, 8, **READ["no_repeat_ngram_size"])
    assert {one.ids for both in answers for one in both} == {(EOS,)}


@pytest.mark.parametrize("key", [*ACCEPTED, "repetition_penalty"])
def test_every_processor_that_reads_tokens_is_known(policy: PolicyEngine, key: str) -> None:
    """With tokens before the last changed but not their number, no other processor gives a different result."""
    value = VALUES[key]
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


# One value of each key under which its processor does something to some row.
VALUES: dict[str, Any] = {
    "min_new_tokens": 6,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[EOS, 5]],
    "suppress_tokens": [4, 5],
    "begin_suppress_tokens": [4, 5],
    "forced_eos_token_id": EOS,
    "exponential_decay_length_penalty": [2, 1.5],
    "sequence_bias": [[[EOS, 5], 9.0]],
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "typical_p": 0.5,
    "epsilon_cutoff": 1e-2,
    "eta_cutoff": 1e-2,
    "top_h": 0.5,
    "watermarking_config": {"bias": 2.5},
    "repetition_penalty": 2.0,
}
