"""Pairwise judges: their interface, the order of completions, and errors."""

from __future__ import annotations

import asyncio
import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from alignment.config.errors import OptionError, RewardError
from alignment.engines.rng import seeded
from alignment.rewards import callables
from alignment.rewards.judges import Judge
from alignment.run.stop import Cut, RunStopped, StopReason, StopRequests

PLACES = [f"rows.jsonl, row {number}" for number in range(40)]


def longer(prompts: list[str], pairs: list[list[str]]) -> list[int]:
    return [0 if len(first) > len(second) else 1 for first, second in pairs]


def verdicts(judge: Any, pairs: list[list[str]], seed: int = 0) -> list[int]:
    prompts: list[Any] = [f"p{number}" for number in range(len(pairs))]
    return Judge(judge).verdicts(prompts, pairs, seed, PLACES[: len(pairs)])


def test_a_verdict_does_not_depend_on_the_order_shown() -> None:
    pairs = [["long text", "short"], ["a", "abc"]] * 10
    for seed in range(5):
        assert verdicts(longer, pairs, seed) == [0, 1] * 10
    assert pairs == [["long text", "short"], ["a", "abc"]] * 10


def test_the_order_depends_on_the_seed() -> None:
    shown: list[list[list[str]]] = []

    def first(prompts: list[str], pairs: list[list[str]]) -> list[int]:
        assert [prompt[1:] for prompt in prompts] == [text[1:] for text, _ in pairs]
        shown.append(pairs)
        return [0] * len(pairs)

    pairs = [[f"a{number}", f"b{number}"] for number in range(40)]
    found = [verdicts(first, pairs, seed) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert shown[0] == shown[1] != shown[2]
    # A judge that always prefers the completion shown first favors neither completion.
    assert all(10 <= sum(answers) <= 30 for answers in found)
    assert found[0] == [int(pair[0].startswith("b")) for pair in shown[0]]


def test_a_random_judge_is_independent_of_the_order() -> None:
    """Not even with the seed that orders the pairs; otherwise it would always prefer the first completion."""

    def tosses(prompts: list[str], pairs: list[list[str]]) -> list[int]:
        return [int(random.random() < 0.5) for _ in pairs]

    answers = []
    for seed in range(10):
        with seeded(seed):
            answers += verdicts(tosses, [["a", "b"]] * 40, seed)
    assert 160 <= sum(answers) <= 240


def test_valid_judges_and_verdicts() -> None:
    class Later:
        async def judge(self, prompts: list[str], pairs: list[list[str]]) -> Any:
            await asyncio.sleep(0)
            return torch.tensor(longer(prompts, pairs))

    async def asynchronous(prompts: list[str], pairs: list[list[str]]) -> list[int]:
        return longer(prompts, pairs)

    pairs = [["abc", "b"], ["a", "bcd"]]
    assert -1 in verdicts(lambda prompts, pairs: np.array([-1, 1]), pairs)
    assert verdicts(Later(), pairs) == verdicts(asynchronous, pairs) == [0, 1]
    assert [type(v) for v in verdicts(Later(), pairs)] == [int, int]
    assert Judge(Later()).name == "Later" and Judge(longer).name == "longer"


def test_a_missing_verdict_is_not_reversed() -> None:
    assert verdicts(lambda prompts, pairs: 1 / 0, []) == [], "not called"
    pairs = [["a", "b"]] * 20
    assert verdicts(lambda prompts, pairs: [-1] * len(pairs), pairs) == [-1] * 20


@pytest.mark.parametrize("trls", [False, True])
def test_conversations_are_passed_unchanged_or_as_text_with_trls_signature(trls: bool) -> None:
    seen: list[Any] = []

    def plain(prompts: list[Any], pairs: list[Any]) -> list[int]:
        seen.extend([prompts, pairs])
        return [1]

    def of_trl(prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[int]:
        return plain(prompts, completions)

    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}]
    pair = [[{"role": "assistant", "content": text}] for text in "ab"]
    Judge(of_trl if trls else plain).verdicts([prompt], [pair], 0, ["row 1"])
    assert seen[0] == (["system: s\nuser: p"] if trls else [prompt])
    assert sorted(seen[1][0], key=str) == (["a", "b"] if trls else pair)


@pytest.mark.parametrize(
    ("returned", "place"),
    [([0], "row 0 to"), (0, "row 0 to"), ([0, 2], "row 1;"), ([0, True], "row 1;"), ([0.0, 1], "row 0;"),
     ([None, 1], "row 0;"), (["A", "B"], "row 0;")],
)  # fmt: skip
def test_invalid_verdicts(returned: Any, place: str) -> None:
    with pytest.raises(RewardError, match=f"returned .* rows.jsonl, {place}"):
        verdicts(lambda prompts, pairs: returned, [["a", "b"], ["c", "d"]])


async def _unreachable(prompts: list[str], pairs: list[list[str]]) -> list[int]:
    raise ConnectionError("no route")


def _typo(prompts: list[str], pairs: list[list[str]]) -> list[int]:
    raise KeyError("typo")


@pytest.mark.parametrize(("judge", "kind"), [(_unreachable, ConnectionError), (_typo, KeyError)])
def test_an_exception_names_judge_line_and_rows(judge: Any, kind: type) -> None:
    with pytest.raises(RewardError) as caught:
        verdicts(judge, [["a", "b"], ["c", "d"]])
    said, where = str(caught.value), f"(test_rewards_judges.py, line {judge.__code__.co_firstlineno + 1})"
    assert said.startswith(f"judge {judge.__name__!r} raised {kind.__name__}: ") and f"{where} while judging" in said
    assert "row 0 to rows.jsonl, row 1" in said and isinstance(caught.value.__cause__, kind)


@pytest.mark.parametrize(
    "judge", [3, dict, lambda prompts: [], lambda a, b, c: [], lambda prompts, completions, gold_completions=None: []]
)
def test_invalid_judges(judge: Any) -> None:
    with pytest.raises(OptionError, match="^judge '"):
        Judge(judge)


def test_a_stop_request_is_not_a_failure_of_a_judge() -> None:
    def asked(prompts: list[str], pairs: list[list[str]]) -> list[int]:
        raise RunStopped(StopReason.SIGTERM, "preempted")

    with pytest.raises(RunStopped):
        verdicts(asked, [["a", "b"]])


@pytest.mark.parametrize("training", [True, False])
def test_a_judge_that_fails_while_the_run_is_stopping(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = StopRequests()
    requests.request(StopReason.SIGTERM)
    monkeypatch.setattr(callables, "REQUESTS", requests)
    with requests.deferred(None) if training else nullcontext():
        with pytest.raises(Cut if training else RewardError) as caught:
            verdicts(_unreachable, [["a", "b"]])
    assert type(caught.value) is (Cut if training else RewardError)
