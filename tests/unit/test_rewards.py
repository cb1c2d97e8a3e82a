"""Reward functions and pairwise judges: arguments, return values, errors, sums of rewards, order of completions."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerState

from alignment.config.errors import OptionError, RewardError
from alignment.engines.rng import seeded
from alignment.rewards import callables
from alignment.rewards.combined import Rewards
from alignment.rewards.functions import FunctionReward, score_all
from alignment.rewards.judges import Judge
from alignment.rewards.samples import Samples
from alignment.run.stop import Cut, RunStopped, StopReason, StopRequests


def test_a_function_can_take_the_state_of_the_run() -> None:
    seen: list[int] = []

    def counts(completions: list[str], trainer_state: TrainerState) -> list[float]:
        seen.append(trainer_state.global_step)
        trainer_state.global_step = 99
        trainer_state.log_history[0]["loss"] = 99.0
        trainer_state.log_history.clear()
        return [0.0] * len(completions)

    rewards, state = Rewards([FunctionReward(counts)]), TrainerState(global_step=7, log_history=[{"loss": 1.0}])
    rewards.check([])
    rewards.follow(state)
    for state.global_step in (7, 8):
        rewards.score(samples(["a"]))
    assert seen == [7, 8] and state.log_history == [{"loss": 1.0}]
    with pytest.raises(OptionError, match="'trainer_state', which is both a built-in argument and a column"):
        rewards.check(["trainer_state"])


def samples(completions: list[str], **columns: list[Any]) -> Samples:
    """Two completions per prompt; a completion that ends with a period has ended."""
    rows = [number // 2 for number in range(len(completions))]
    prompts, places = [f"p{row}" for row in rows], [f"rows.jsonl, row {1 + row}" for row in rows]
    ids, ended = [list(map(ord, text)) for text in completions], [text.endswith(".") for text in completions]
    return Samples(prompts, list(completions), ids, ended, columns, places, [{} for _ in completions])


def lengths(completions: list[str], **kwargs: Any) -> list[int]:
    return [len(text) for text in completions]


def returning(value: Any) -> Callable[..., Any]:
    def given(completions: list[str]) -> Any:
        return value

    return given


def test_a_function_gets_the_arguments_in_its_signature() -> None:
    asked: list[dict[str, Any]] = []

    def plain(completions: list[str], answer: list[str], shift: int = 7) -> list[float]:
        asked.append({"completions": completions, "answer": answer, "shift": shift})
        return [1.0] * len(completions)

    def everything(prompts: list[str], **kwargs: Any) -> list[float]:
        asked.append({"prompts": prompts, **kwargs})
        return [2.0] * len(prompts)

    def of_ids(*, completion_ids: list[list[int]]) -> list[float]:
        return [float(sum(ids)) for ids in completion_ids]

    given = samples(["a.", "b"], answer=["x", "x"], source=[1, 2])
    scores = score_all([FunctionReward(function) for function in (plain, everything, of_ids)], given)
    assert scores == [[1.0, 1.0], [2.0, 2.0], [97.0 + 46.0, 98.0]]
    assert asked[0] == {"completions": ["a.", "b"], "answer": ["x", "x"], "shift": 7}
    assert isinstance(asked[1].pop("trainer_state"), TrainerState)
    texts = {"prompts": ["p0", "p0"], "completions": ["a.", "b"], "completion_ids": [[97, 46], [98]]}
    assert asked[1] == texts | {"answer": ["x", "x"], "source": [1, 2]}


def test_a_function_may_modify_its_arguments() -> None:
    def cuts(completion_ids: list[list[int]], completions: list[Any]) -> list[int]:
        completions.clear()
        return [ids.pop() for ids in completion_ids]

    given = samples(["ab", "cd"])
    assert FunctionReward(cuts).score(given) == [98.0, 100.0]
    assert given.completion_ids == [[97, 98], [99, 100]] and given.completions == ["ab", "cd"]


@pytest.mark.parametrize(
    "returned",
    [
        (1, 0.5, None), deque([1, 0.5, None]), [True, np.float32(0.5), None], np.array([1, 0.5, None], dtype=object),
        [torch.tensor(1), torch.tensor(0.5, dtype=torch.bfloat16), None],
    ],
)  # fmt: skip
def test_valid_return_values(returned: Any) -> None:
    found = FunctionReward(returning(returned)).score(samples(["a", "b", "c"]))
    assert found == [1.0, 0.5, None]
    assert [type(value) for value in found] == [float, float, type(None)]


SPAN = "rows.jsonl, row 1; rows.jsonl, row 2"


@pytest.mark.parametrize(
    ("returned", "place"),
    [
        ([1.0, 2.0], SPAN), ([1.0] * 4, SPAN), (1.0, SPAN), (torch.tensor(1.0), SPAN), (None, SPAN), ("abc", SPAN),
        ({1: 2}, SPAN), (torch.zeros(3, 1), "for rows.jsonl, row 1;"), ([1.0, 2.0, "3"], "for rows.jsonl, row 2;"),
        ([1.0, 2.0, math.nan], "for rows.jsonl, row 2;"), ([10**400, 1, 1], "for rows.jsonl, row 1;"),
        (torch.tensor([1.0, -math.inf, 0.0]), "for rows.jsonl, row 1;"), ([1.0, 2.0, 1j], "for rows.jsonl, row 2;"),
        # One element, but in a list that a function may have forgotten to reduce.
        ([1.0, 2.0, torch.ones(1)], "for rows.jsonl, row 2;"),
    ],
)  # fmt: skip
def test_invalid_scores(returned: Any, place: str) -> None:
    with pytest.raises(RewardError) as caught:
        FunctionReward(returning(returned)).score(samples(["a", "b", "c"]))
    assert str(caught.value).startswith("reward function 'given' returned") and place in str(caught.value)


def helper(text: str) -> int:
    return {"a": 1}[text]


def test_an_exception_names_function_line_and_rows() -> None:
    def breaks(completions: list[str]) -> list[int]:
        return [helper(text) for text in completions]

    with pytest.raises(RewardError) as caught:
        FunctionReward(breaks).score(samples(["a", "b", "a"]))
    said = f"'breaks' raised KeyError: 'b' (test_rewards.py, line {helper.__code__.co_firstlineno + 1}) while scoring"
    assert f"{said} {SPAN}; " in str(caught.value) and isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RewardError, match="while scoring rows.jsonl, row 1; "):
        FunctionReward(breaks).score(samples(["b", "b"]))  # one prompt, named once


def test_coroutines_are_awaited_concurrently() -> None:
    """Each waits until both have started, so sequential calls would never return."""
    begun: list[str] = []

    def meeting(name: str) -> Callable[..., Any]:
        async def meets(completions: list[str], **kwargs: Any) -> list[float]:
            begun.append(name)
            for _ in range(500):
                if len(begun) == 2:
                    return [float(len(name))] * len(completions)
                await asyncio.sleep(0.01)
            raise TimeoutError("alone")

        return meets

    async_one, other = meeting("one"), meeting("other")

    def sync_returns_awaitable(completions: list[str]) -> Any:
        return other(completions)

    sources = [FunctionReward(f) for f in (async_one, lengths, sync_returns_awaitable)]
    assert score_all(sources, samples(["a", "bcd"])) == [[3.0, 3.0], [1.0, 3.0], [5.0, 5.0]]


def test_coroutines_with_a_running_loop_and_across_steps() -> None:
    """As in a notebook; and objects bound to a loop, such as a client's lock, remain usable in the next step."""
    lock: list[asyncio.Lock] = []
    loops: list[Any] = []

    async def locked(completions: list[str]) -> list[float]:
        lock[:] = lock or [asyncio.Lock()]
        loops.append(asyncio.get_running_loop())
        async with lock[0]:
            await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def cell() -> list[list[float | None]]:
        return [FunctionReward(locked).score(samples(["a"])) for _ in range(2)]

    assert asyncio.run(cell()) == [[1.0], [1.0]]
    assert FunctionReward(locked).score(samples(["a"])) == [1.0]
    assert len(loops) == 3 and len(set(loops)) == 1


def test_coroutines_run_on_the_gpu_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current CUDA device belongs to a thread, and is the first one in a new thread."""
    gpu, chosen = torch.device("cuda", 3), {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda where: chosen.update({threading.current_thread(): where}))
    monkeypatch.setattr(callables, "device", lambda: gpu)
    monkeypatch.setattr(callables, "_event_loop", functools.cache(callables._event_loop.__wrapped__))

    async def both_threads() -> set[threading.Thread]:
        return {threading.current_thread(), await asyncio.to_thread(threading.current_thread)}

    (threads,) = callables.together([both_threads()])
    assert len(threads) == 2 and chosen == dict.fromkeys(threads, gpu)


def test_a_failed_coroutine_is_named_and_all_are_awaited() -> None:
    finished: list[bool] = []

    async def slow(completions: list[str]) -> list[float]:
        await asyncio.sleep(0.05)
        finished.append(True)
        return [1.0] * len(completions)

    def raising(error: BaseException, later: bool) -> FunctionReward:
        async def fails_later(completions: list[str]) -> list[float]:
            raise error

        def fails(completions: list[str]) -> list[float]:
            raise error

        return FunctionReward(fails_later if later else fails)

    errors = [ConnectionError("no route"), SystemExit(3), asyncio.CancelledError("gone")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # coroutines that are never awaited
        for error in errors:
            for later in (False, True):
                with pytest.raises(RewardError, match=f"'fails(_later)?' raised {type(error).__name__}.*while sco"):
                    score_all([raising(error, later), FunctionReward(slow)], samples(["a"]))
        with pytest.raises(RewardError, match="'fails_later' raised ConnectionError"):  # the first one
            score_all([raising(errors[0], True), raising(ValueError("early"), False)], samples(["a"]))
    assert finished == [True] * 6


def test_arguments_are_checked_before_training() -> None:
    def needs(prompts: list[str], *, answers: list[str], level: int = 1) -> list[float]:
        return []

    FunctionReward(needs).check({"answers", "unused"})
    with pytest.raises(OptionError, match="^reward function 'needs': .*'answers'.*(answer, source|source, answer)"):
        FunctionReward(needs).check({"answer", "source"})
    with pytest.raises(OptionError, match="'answers', and data.jsonl"):
        Rewards([FunctionReward(lengths), FunctionReward(needs)]).check([], "data.jsonl")
    with pytest.raises(OptionError, match="'completions'"):
        FunctionReward(lengths).check(["completions"])
    for function in (eval("lambda texts, /: texts"), type):
        with pytest.raises(OptionError, match="^reward function"):
            FunctionReward(function).check([])


class Scorer:
    def __call__(self, completions: list[str]) -> list[int]:
        return lengths(completions)


def test_names() -> None:
    functions = [lengths, functools.partial(lengths), Scorer(), lengths, functools.partial(lengths, x=1)]
    rewards = Rewards([FunctionReward(f) for f in functions])
    assert rewards.names == ["lengths", "lengths_2", "Scorer", "lengths_3", "lengths_4"]
    clashing = [type(name, (Scorer,), {})() for name in ("a_2", "a", "a")]
    assert Rewards([FunctionReward(f) for f in clashing]).names == ["a_2", "a", "a_3"]


def partial_scores(completions: list[str]) -> list[float | None]:
    """Return no score for texts that contain an x."""
    return [None if "x" in text else 10.0 for text in completions]


def mostly_silent(completions: list[str]) -> list[float | None]:
    return [1.0 if text.startswith("a") else None for text in completions]


def test_the_weighted_sum() -> None:
    rewards = Rewards([FunctionReward(partial_scores), FunctionReward(mostly_silent)], [0.5, -2.0], 0.25)
    scores = rewards.score(samples(["a.", "ax.", "b", "x", "x."]))
    assert scores.total == [3.0, -2.0, 5.0 - 0.25, None, None]
    assert list(scores.by_source.values()) == [[10.0, None, 10.0, None, None], [1.0, 1.0, None, None, None]]
    assert (scores.ignored, scores.truncated) == (6, 0)
    assert Rewards([FunctionReward(lengths)]).score(samples(["a", "b."])).total == [1.0, 2.0]


class Counting:
    """A source that runs collectives, like a reward model."""

    name = "model"

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.truncated, self.closed = 0, False

    def score(self, samples: Samples) -> list[float | None]:
        self.sizes.append(len(samples))
        self.truncated = len(samples)
        return [100.0] * len(samples)

    def close(self) -> None:
        self.closed = True


def test_functions_are_called_first_and_not_without_samples() -> None:
    calls: list[int] = []

    def counted(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        return [1.0 / len(completions)] * len(completions)

    model = Counting()
    rewards = Rewards([model, FunctionReward(counted)])
    empty = rewards.score(samples([]))
    assert (empty.total, empty.by_source, empty.ignored) == ([], {"model": [], "counted": []}, 0)
    assert (model.sizes, calls) == ([0], [])
    scores = rewards.score(samples(["a", "b"]))
    assert list(scores.by_source) == ["model", "counted"] and scores.total == [100.5, 100.5]
    assert (model.sizes, calls, scores.truncated) == ([0, 2], [2], 2)

    failing = Rewards([model, FunctionReward(returning([]))])
    with pytest.raises(RewardError, match="'given' returned 0 scores"):
        failing.score(samples(["a"]))
    assert model.sizes == [0, 2]
    rewards.close()
    assert model.closed


@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], [1.0, math.nan]])
def test_weights_are_checked(weights: list[float]) -> None:
    with pytest.raises(OptionError, match="^reward_weights: .*(lengths, partial_scores|nan)"):
        Rewards([FunctionReward(lengths), FunctionReward(partial_scores)], weights)


def test_a_stop_request_is_not_a_failure_of_a_reward_or_a_judge() -> None:
    def asked(prompts: list[str], pairs: Any = None) -> list[Any]:
        raise RunStopped(StopReason.SIGTERM, "preempted")

    with pytest.raises(RunStopped):
        score_all([FunctionReward(asked)], samples(["a"]))
    with pytest.raises(RunStopped):
        verdicts(asked, [["a", "b"]])


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
    [([0], "row 0; rows.jsonl, row 1"), (0, "row 0; rows.jsonl, row 1"), ([0, 2], "row 1;"), ([0, True], "row 1;"),
     ([0.0, 1], "row 0;"), ([None, 1], "row 0;"), (["A", "B"], "row 0;")],
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
    said, where = str(caught.value), f"(test_rewards.py, line {judge.__code__.co_firstlineno + 1})"
    assert said.startswith(f"judge {judge.__name__!r} raised {kind.__name__}: ") and f"{where} while judging" in said
    assert "row 0; rows.jsonl, row 1" in said and isinstance(caught.value.__cause__, kind)


@pytest.mark.parametrize(
    "judge", [3, dict, lambda prompts: [], lambda a, b, c: [], lambda prompts, completions, gold_completions=None: []]
)
def test_invalid_judges(judge: Any) -> None:
    with pytest.raises(OptionError, match="^judge '"):
        Judge(judge)


@pytest.mark.parametrize("training", [True, False])
def test_a_judge_that_fails_while_the_run_is_stopping(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = StopRequests()
    requests.request(StopReason.SIGTERM)
    monkeypatch.setattr(callables, "REQUESTS", requests)
    with requests.deferred(None) if training else nullcontext():
        with pytest.raises(Cut if training else RewardError) as caught:
            verdicts(_unreachable, [["a", "b"]])
    assert type(caught.value) is (Cut if training else RewardError)
