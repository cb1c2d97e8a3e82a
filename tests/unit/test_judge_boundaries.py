"""Limits of judges that ask a model: retries, pauses, requests, unanswered questions, values of arguments."""

from __future__ import annotations

import io
import json
import math
import time
import urllib.error
from collections.abc import Callable
from email.message import Message
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.config.errors import OptionError, RewardError
from alignment.rewards import asking, endpoint
from alignment.rewards.asking import Broken, Busy, ModelJudge, NoAnswer, check_number
from alignment.rewards.endpoint import EndpointJudge, is_busy, retry_after
from alignment.rewards.hub_judges import HfPairwiseJudge

PAIR = ["a", "b"]


class Asked(ModelJudge):
    """A judge in memory, whose answers are a function of the number of the question."""

    where, identity = "memory", {}  # type: ignore[assignment]

    def __init__(self, answer: Callable[[int], Any], **options: Any) -> None:
        super().__init__(**{"pause": 0, "retries": 0, "concurrency": 1, **options})
        self.answer, self.count = answer, 0

    def ask(self, text: str) -> str | None:
        number, self.count = self.count, self.count + 1
        found = self.answer(number)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]


@given(answers=st.lists(st.sampled_from(["0", "1", None, "x"]), min_size=6, max_size=6))
def test_a_verdict_needs_two_equal_answers(answers: list[str | None]) -> None:
    judge = Asked(answers.__getitem__)
    expected = []
    for first, second in zip(answers[::2], answers[1::2]):
        agree = (first, second) in (("0", "1"), ("1", "0"))  # the second shows the completions in reverse order
        expected.append(int(str(first)) if agree else -1)
    assert judge.judge(["p"] * 3, [PAIR] * 3) == expected and judge.num_requests == 6


@pytest.mark.parametrize(
    ("most", "both", "asked", "told"),
    [(None, True, 6, 0), (6, True, 6, 0), (5, True, 4, 1), (4, True, 4, 1), (1, True, 0, 1), (3, False, 3, 0),
     (2, False, 2, 1)],
)  # fmt: skip
def test_pairs_within_the_limit_of_requests_are_asked_completely(
    most: int | None, both: bool, asked: int, told: int, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = Asked(lambda number: "01"[number % 2] if both else "0", max_requests=most, both_orders=both)
    each = 2 if both else 1
    found = judge.judge(["p"] * 3, [PAIR] * 3, shuffle_order=False)
    assert found == [0] * (asked // each) + [-1] * (3 - asked // each) and judge.count == asked
    assert capsys.readouterr().out.count("max_requests=") == told
    again = judge.judge(["p"] * 3, [PAIR] * 3, shuffle_order=False)
    assert again == [0 if most is None else -1] * 3
    assert capsys.readouterr().out.count("max_requests=") == (most is not None and not told), "once"


BUSY, BROKEN, NONE = Busy("busy"), Broken("broken"), NoAnswer("none", 400)


@pytest.mark.parametrize(
    ("before", "answers", "verdicts"),
    [
        ([], [BUSY, BUSY], "error"), ([], [BROKEN, BROKEN], "error"), (["0", "1"], [BROKEN, BROKEN], "error"),
        (["0", "1"], [BUSY, BUSY], "error"), ([], [NONE, NONE], "error"), (["0", "1"], [NONE, NONE], [-1]),
        ([], [NONE, NONE, "0", "1"], [-1, 0]), ([], ["0", "1", BUSY, BUSY], [0, -1]),
        ([], ["0", "1", BROKEN, "1"], "error"), ([], ["0", "1", NONE, "1"], [0, -1]),
    ],
)  # fmt: skip
def test_an_endpoint_that_fails_ends_the_run_and_an_unanswered_question_does_not(
    before: list[Any], answers: list[Any], verdicts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question may be at fault itself (``NONE``) only once the endpoint has ever answered."""
    judge = Asked([*before, *answers].__getitem__)
    if before:
        assert judge.judge(["p"], [PAIR]) == [0]
    count = len(answers) // 2
    if verdicts == "error":
        with pytest.raises(RewardError, match="^judge memory: . of . questions were not answered: "):
            judge.judge(["p"] * count, [PAIR] * count)
        return
    assert judge.judge(["p"] * count, [PAIR] * count) == verdicts
    assert "their pairs get no verdict" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pause", "after", "pauses"),
    [(1.0, None, [1, 2, 4, 8]), (40.0, None, [40, 80, 160, 300]), (1.0, 3.0, [3] * 4), (1.0, 400.0, [300] * 4),
     (0, None, [0] * 4)],
)  # fmt: skip
def test_pauses_double_up_to_five_minutes(
    pause: float, after: float | None, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the endpoint names one, which then applies to all questions."""
    now, waited = [50.0], list[float]()
    monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        now[0] += seconds
        return False

    rounds = asking._Round()
    rounds.ended = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    judge = Asked(lambda number: Busy("busy", after) if number < 4 else "0", retries=4, pause=pause)
    assert judge._repeated("text", rounds) == "0" and waited == pauses
    rounds._answered = False
    judge = Asked(lambda number: Busy("busy", after), retries=4, pause=pause)
    with pytest.raises(Busy, match="^busy, after 4 retries$"):
        judge._repeated("text", rounds)
    assert judge.count == 5 and rounds.hopeless
    rounds.answered()
    assert not rounds.hopeless


@pytest.mark.parametrize(
    ("value", "least", "whole", "accepted"),
    [(1, 1, True, True), (0, 1, True, False), (1.0, 1, True, False), (True, 0, True, False), (0, 0, False, True),
     (0.001, 0.001, False, True), (0.0009, 0.001, False, False), (math.nan, 0, False, False), ("1", 0, False, False),
     (None, 0, False, False)],
)  # fmt: skip
def test_numbers(value: Any, least: float, whole: bool, accepted: bool) -> None:
    if accepted:
        check_number("n", value, least, whole=whole)
        return
    with pytest.raises(OptionError, match="^n="):
        check_number("n", value, least, whole=whole)


@pytest.mark.parametrize(
    ("name", "last", "beyond"),
    [("max_requests", 1, 0), ("concurrency", 1, 0), ("retries", 0, -1), ("pause", 0, -0.5), ("timeout", 0.001, 0),
     ("max_tokens", 1, 0), ("model", "m", " "), ("api_key_env", "K", ""), ("base_url", "http://h:1", "")],
)  # fmt: skip
def test_arguments_of_an_endpoint_at_their_limits(name: str, last: Any, beyond: Any) -> None:
    usual = {"model": "m", "base_url": "http://h/v1"}
    assert getattr(EndpointJudge(**{**usual, name: last}), name) == last
    with pytest.raises(OptionError, match=f"^{name}="):
        EndpointJudge(**{**usual, name: beyond})


@pytest.mark.parametrize(
    ("url", "kept"),
    [("http://h/v1/", "http://h/v1"), (" https://h:8/v1/chat/completions ", "https://h:8/v1"), ("ftp://h/v1", None),
     ("http://", None), ("http://h:99999/v1", None), ("http://u@h/v1", None), ("http://h/v1#x", None),
     ("http://:p@h/v1", None)],
)  # fmt: skip
def test_urls(url: str, kept: str | None) -> None:
    if kept is not None:
        assert EndpointJudge("m", url).base_url == kept
        return
    with pytest.raises(OptionError, match="^base_url"):
        EndpointJudge("m", url)


def test_statuses_that_are_worth_a_retry() -> None:
    assert [status for status in range(300, 601) if is_busy(status)] == [408, 409, 425, 429, *range(500, 601)]


def test_the_header_of_a_retry() -> None:
    assert [retry_after(text) for text in (None, "", "soon", "0", "-1", "2.5")] == [None, None, None, 0, 0, 2.5]
    assert retry_after(formatdate(0, usegmt=True)) == 0
    assert retry_after(formatdate(time.time() + 100, usegmt=True)) == pytest.approx(100, abs=20)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, Broken), (402, Broken), (403, Broken), (404, Broken), (399, Broken), (400, NoAnswer), (503, Busy)],
)  # fmt: skip
def test_refusals_of_the_hub(status: int, kind: type) -> None:
    judge = HfPairwiseJudge("m")

    class Refused(Exception):
        response = SimpleNamespace(status_code=status, headers={"retry-after": "7"})

    def fail(*_: Any, **__: Any) -> None:
        raise Refused

    judge.client = SimpleNamespace(chat_completion=fail)
    with pytest.raises(NoAnswer) as refused:
        judge.ask("text")
    assert type(refused.value) is kind
    assert (refused.value.after if isinstance(refused.value, Busy) else refused.value.status) == (
        7 if kind is Busy else status
    )


@pytest.mark.parametrize(
    ("served", "raises"), [(["x"] * 8, True), (["x"] * 9, False), (["m", "x"], False), ([], False)]
)
def test_the_models_that_an_endpoint_serves(served: list[str], raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer list may be one of several pages."""
    judge = EndpointJudge("m", "http://h/v1")
    monkeypatch.setattr(judge, "_request", lambda *_: {"data": [{"id": name} for name in served]})
    if not raises:
        judge.check()
        return
    with pytest.raises(RewardError, match="it serves x"):
        judge.check()


@pytest.mark.parametrize(
    ("body", "said"),
    [({"error": {"message": "a\nb"}}, "a b"), ({"error": "c"}, "c"), ({"message": "d"}, "d"), ({"error": 1}, ""),
     ([], ""), ({"error": "x" * 200}, "x" * 200), ({"error": "x" * 201}, "x" * 199 + "…")],
)  # fmt: skip
def test_what_an_endpoint_said(body: Any, said: str) -> None:
    assert endpoint._said(json.dumps(body).encode()) == said
    assert endpoint._said(b"<html>") == ""


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (500, b"", Busy, "HTTP 500"),
        (429, b'{"error": "slow down SECRET"}', Busy, "HTTP 429 (slow down <hidden>)"),
        (404, b"{}", Broken, "HTTP 404; check base_url and model"),
        (302, b"", Broken, "HTTP 302; check base_url and model"),
        (400, b'{"message": "too long"}', NoAnswer, "HTTP 400 (too long)"),
        (401, b'{"error": "SECRET"}', Broken, "HTTP 401; the key in OPENAI_API_KEY was rejected"),
    ],
)
def test_refusals_of_an_endpoint(status: int, body: bytes, kind: type, text: str) -> None:
    headers = Message()
    headers["Retry-After"] = "3"
    error = urllib.error.HTTPError("http://h", status, "", headers, io.BytesIO(body))
    found = EndpointJudge("m", "http://h/v1")._refusal(error, "SECRET")
    assert type(found) is kind and str(found) == text
    assert getattr(found, "after", 3) == 3 and found.status == (None if kind is Busy else status)
