"""Transient failures are retried after pauses and counted; everything else is raised immediately."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import requests
from huggingface_hub.errors import OfflineModeIsEnabled

from alignment.config.errors import DataError, RewardError
from alignment.rewards.functions import FunctionReward, score_all
from alignment.rewards.judges import Judge
from alignment.rewards.samples import Samples
from alignment.run.activity import ACTIVITY
from alignment.run.retries import Retries, is_transient
from alignment.run.stop import REQUESTS, StopReason


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, which take no time."""
    made: list[float] = []
    monkeypatch.setattr("alignment.run.retries.time", SimpleNamespace(sleep=made.append))
    return made


class Failing:
    """Raises one error per call, then returns a value."""

    def __init__(self, *errors: BaseException, result: Any = "read") -> None:
        self.errors, self.result, self.calls = list(errors), result, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.result(*args, **kwargs) if callable(self.result) else self.result


def answered(status: int) -> Exception:
    """An HTTP client's error, with a status."""
    return type("Answered", (Exception,), {"status_code": status})()


def with_response(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://a")
    return httpx.HTTPStatusError("failed", request=request, response=httpx.Response(status, request=request))


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


TRANSIENT = [
    OSError(errno.EIO, "Input/output error"),
    ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    TimeoutError(),
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    httpx.ConnectTimeout("timed out"),
    httpx.RemoteProtocolError("peer closed connection"),
    requests.exceptions.ConnectionError("refused"),
    requests.exceptions.ReadTimeout("timed out"),
    with_response(503),
    answered(429),
    type("APITimeoutError", (Exception,), {})(),  # identified by its name, as its client may not be installed
    caused(DataError("a.jsonl: cannot be read"), OSError(errno.EIO, "Input/output error")),
]
PERMANENT = [
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    OSError(errno.ENOSPC, "No space left on device"),
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    ValueError("not JSON"),
    with_response(404),
    answered(401),
    caused(ConnectionError("Couldn't reach 'a' on the Hub"), OfflineModeIsEnabled("offline")),
    ConnectionError("Couldn't reach 'a' on the Hub (OfflineModeIsEnabled)"),  # as load_dataset raises it
    caused(with_response(404), httpx.ConnectError("refused")),
]


@pytest.mark.parametrize(("error", "passes"), [*((e, True) for e in TRANSIENT), *((e, False) for e in PERMANENT)])
def test_transient_and_permanent_errors(error: Exception, passes: bool) -> None:
    assert is_transient(error) == passes


def test_a_call_is_retried_after_growing_pauses(
    capsys: pytest.CaptureFixture[str], pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    signs: list[float] = []
    monkeypatch.setattr(ACTIVITY, "progress", lambda: signs.append(sum(pauses)))
    call = Failing(TimeoutError("slow"), OSError(errno.EIO, "bad block"))
    assert Retries(3, 4.0)("data.jsonl", call) == "read"
    assert call.calls == 3
    assert sum(pauses) == 4 + 8 and signs == list(range(12)), "in slices, each of which reports progress"
    assert "data.jsonl: TimeoutError: slow; retry 1 of 3 in 4 s\n" in capsys.readouterr().out


def test_the_last_error_is_raised() -> None:
    call = Failing(*(TimeoutError(str(number)) for number in range(9)))
    with pytest.raises(TimeoutError, match="^3$"):
        Retries(3, 4.0)("a", call)
    assert call.calls == 4
    with pytest.raises(ValueError, match="wrong"):
        Retries(3, 4.0)("a", Failing(ValueError("wrong")))


def test_retries_of_all_ranks_are_counted() -> None:
    one, other = Retries(3, 4.0), Retries(3, 4.0)
    one("a", Failing(TimeoutError(), TimeoutError()))
    other("b", Failing(TimeoutError("slow")))
    assert one.metrics == {} and one.count == 0
    everyone = [one.taken(), other.taken()]
    one.counted(everyone), other.counted(everyone)
    assert one.metrics == other.metrics == {"retries": 3.0} and one.taken() == 0
    again = Retries(3, 4.0)
    again("c", Failing(TimeoutError()))
    again.counted([again.taken()])
    again.load_state_dict(one.state_dict())
    assert again.count == 4  # those before a restart, and those since its start


def test_a_pause_grows_to_five_minutes_and_ends_at_a_stop_request(pauses: list[float]) -> None:
    """A longer one stays as it is."""
    for first, number, wanted in ((4.0, 12, 300), (150.0, 1, 150), (150.0, 2, 300), (400.0, 3, 400), (0.25, 3, 1)):
        pauses.clear()
        assert Retries(20, first).again("a", TimeoutError(), number) and sum(pauses) == wanted and max(pauses) <= 1
    pauses.clear()
    REQUESTS.request(StopReason.SIGTERM)
    try:
        assert Retries(20, 4.0).again("a", TimeoutError(), 1)
    finally:
        REQUESTS.forget()
    assert pauses == [], "it is retried immediately"


def samples(count: int = 2) -> Samples:
    places = [f"row {number}" for number in range(count)]
    each: dict[str, Any] = {"ended": [True] * count, "columns": {}, "template": [{}] * count}
    return Samples(["p"] * count, ["c"] * count, [[1]] * count, places=places, **each)


def named(name: str, call: Callable[..., Any]) -> FunctionReward:
    def function(completions: list[Any]) -> Any:
        return call(completions)

    function.__name__ = name
    return FunctionReward(function)


def test_functions_are_called_again_with_the_same_arguments() -> None:
    def score(completions: list[Any]) -> list[float]:
        return [random.random() for _ in completions]

    def spoils(completions: list[Any]) -> list[float]:
        random.random(), completions.clear()
        if not failed:
            failed.append(True)
            raise ConnectionResetError("reset")
        return score([0, 0])

    failed: list[bool] = []
    random.seed(0)
    first = score_all([named("a", lambda c: (random.random(), score(c))[1]), named("b", score)], samples())
    random.seed(0)
    again = Retries(3, 4.0)
    assert score_all([named("a", spoils), named("b", score)], samples(), again) == first
    assert again.taken() == 1


def test_only_failed_awaitables_are_awaited_again() -> None:
    calls = {"good": 0, "bad": 0}

    async def good(completions: list[Any]) -> list[float]:
        calls["good"] += 1
        return [1.0] * len(completions)

    async def bad(completions: list[Any]) -> list[float]:
        calls["bad"] += 1
        if calls["bad"] < 3:
            raise httpx.ReadTimeout("slow")
        return [2.0] * len(completions)

    again = Retries(3, 4.0)
    assert score_all([FunctionReward(good), FunctionReward(bad)], samples(), again) == [[1.0, 1.0], [2.0, 2.0]]
    assert calls == {"good": 1, "bad": 3}
    assert again.taken() == 2


@pytest.mark.parametrize("error", [ValueError("wrong"), httpx.ReadTimeout("slow")])
def test_a_function_that_keeps_failing_is_reported(error: Exception) -> None:
    call = Failing(*[error] * 9)

    async def bad(completions: list[Any]) -> Any:
        return call()

    for function in (FunctionReward(bad), named("bad", call)):
        call.calls = 0
        with pytest.raises(RewardError, match=f"'bad' raised {type(error).__name__}"):
            score_all([function], samples(), Retries(2, 4.0))
        assert call.calls == (3 if is_transient(error) else 1)


@pytest.mark.parametrize("awaited", [False, True])
def test_a_judge_is_called_again(awaited: bool) -> None:
    asked: list[int] = []

    def answer(prompts: list[Any], pairs: list[Any]) -> list[int]:
        asked.append(len(pairs))
        pairs.clear()
        if len(asked) == 1:
            raise TimeoutError("slow")
        return [0] * len(prompts)

    async def judge(prompts: list[Any], pairs: list[Any]) -> list[int]:
        return answer(prompts, pairs)

    again = Retries(3, 4.0)
    made = Judge(judge if awaited else answer, retries=again)
    verdicts = made.verdicts(["p", "q"], [["a", "b"], ["c", "d"]], 0, ["row 1", "row 2"])
    assert asked == [2, 2] and again.count == 1
    assert verdicts == Judge(lambda p, c: [0, 0]).verdicts(["p", "q"], [["a", "b"], ["c", "d"]], 0, ["r", "s"])
