"""Judges that query a model: questions, answers, both orders, and endpoints that are busy, broken or unavailable."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.judge_server import Answer, sequence, serving

from alignment import HfPairwiseJudge, LLMJudge, OpenAIPairwiseJudge
from alignment.checkpoint.fingerprints import code_fingerprint
from alignment.config.errors import OptionError, RewardError
from alignment.config.registry import METHODS
from alignment.online.arguments import given_judge
from alignment.rewards import callables, llm_judge
from alignment.rewards.judges import Judge
from alignment.rewards.llm_judge import JudgeSettings, _verdict
from alignment.run.retries import Retries
from alignment.run.stop import Cut, StopReason, StopRequests

KEY = "sk-secret-0123456789"
RESPONSES = re.compile(r'<response id="[01]">\n(.*?)\n</response>', re.DOTALL)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "JUDGE_KEY"):
        monkeypatch.delenv(name, raising=False)


def longer(text: str) -> Answer:
    """A judge that prefers the longer response, regardless of its position."""
    first, second = RESPONSES.findall(text)
    return Answer("0" if len(first) > len(second) else "1")


def judge(url: str, **more: Any) -> LLMJudge:
    return LLMJudge("m", url, **{"retries": 2, "timeout": 5.0, **more})


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("0", 0), ("1", 1), (" 1\n", 1), ('"0".', 0), ("**1**\n\nBecause it answers", 1),
        ("<think>0 is short, so 1? No.</think>\n\n0", 0), ("1. Response 0 is better", -1), ("-1", -1),
        ("\N{MINUS SIGN}1", -1), ("10", -1), ("2", -1), ("Response 1", -1), ("", -1), (None, -1),
    ],
)  # fmt: skip
def test_parsing_of_answers(answer: str | None, verdict: int) -> None:
    assert _verdict(answer, False) == verdict and _verdict(answer, True) == (1 - verdict if verdict >= 0 else -1)


def test_instructions() -> None:
    with serving(sequence(Answer("0"), Answer("1"))) as server:
        own = judge(server.url, system_prompt="{{x}} {prompt}|{response0}|{response1}", concurrency=1)
        assert own.judge(["{p}"], [["{0}", "}"]]) == [0] and server.asked == ["{x} {p}|{0}|}", "{x} {p}|}|{0}"]
    for bad in ("{prompt} {response0}", "{response0} {response1} {}", "{response0} {response1} {", "{response0} {a}"):
        with pytest.raises(OptionError, match="^judge: system_prompt: "):
            judge("http://h/v1", system_prompt=bad)


def test_both_orders_must_agree_on_the_better_completion() -> None:
    with serving(lambda text: longer(text)._replace(wait=0.02)) as server:
        one = judge(server.url, concurrency=4)
        assert one.judge(["p"] * 6, [["long one", "short"], ["b", "bb"]] * 3) == [0, 1] * 3
        shown = [tuple(RESPONSES.findall(text)) for text in server.asked]
        assert sorted(shown) == sorted([("long one", "short"), ("short", "long one"), ("b", "bb"), ("bb", "b")] * 3)
        assert 1 < server.most <= 4
        assert server.bodies[0] | {"messages": 0} == {"model": "m", "messages": 0, "max_tokens": 16, "temperature": 0}
    with serving(sequence(Answer("0"))) as server:  # always the one shown first
        assert judge(server.url).judge(["p"] * 2, [["a", "b"], ["c", "d"]]) == [-1, -1]


def test_a_single_random_order_is_reversed_in_the_verdict() -> None:
    with serving(longer) as server:
        np.random.seed(0)
        one = judge(server.url, both_orders=False)
        assert one.judge(["p"] * 20, [["long one", "short"], ["b", "bb"]] * 10) == [0, 1] * 10
        assert len(server.asked) == 20 and len({tuple(RESPONSES.findall(text)) for text in server.asked}) == 4
        del server.asked[:]
        one.judge(["p"] * 5, [["a", "bb"]] * 5, shuffle_order=False)
        assert {tuple(RESPONSES.findall(text)) for text in server.asked} == {("a", "bb")}
        del server.bodies[:]
        more = {"max_tokens": None, "max_completion_tokens": 9, "seed": 1}
        judge(server.url, extra_body=more).judge(["p"], [["a", "bb"]])
        assert server.bodies[0].keys() == {"model", "messages", "temperature", *more} - {"max_tokens"}


@pytest.mark.parametrize(
    "trouble",
    [  # The third one closes the connection, and the last one is slower than the timeout.
        Answer(status=500), Answer(status=429, body=b"{}", headers=(("Retry-After", "0.05"),)), Answer(status=0),
        Answer("0", cut=True), Answer("0", wait=1.0),
    ],
)  # fmt: skip
def test_transient_errors_are_retried(trouble: Answer) -> None:
    with serving(sequence(trouble, Answer("1"), trouble, Answer("0"))) as server:
        one = judge(server.url, concurrency=1, timeout=0.2)
        assert one.judge(["p"], [["a", "bb"]]) == [1]
        assert len(server.asked) == 4 and server.asked[0] == server.asked[1] != server.asked[2]


def test_a_slow_response_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, each of which is in time."""
    monkeypatch.setattr(llm_judge, "_LONGEST_WAIT_S", 0.1)
    with serving(sequence(Answer("0", drip=0.05))) as server, pytest.raises(RewardError, match="TimeoutError"):
        judge(server.url, concurrency=2, timeout=0.2, retries=0).judge(["p"], [["a", "b"]])


@pytest.mark.parametrize("stopping", [True, False])
def test_an_interrupt_or_a_stop_does_not_wait_for_answers(stopping: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = StopRequests()
    for module in (callables, llm_judge):
        monkeypatch.setattr(module, "REQUESTS", requests)

    def look() -> None:
        if stopping:
            return requests.request(StopReason.SIGTERM)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm_judge.ACTIVITY, "progress", look)
    began = time.monotonic()
    with serving(sequence(Answer("0", wait=30.0))) as server, requests.deferred(None):
        with pytest.raises(Cut if stopping else KeyboardInterrupt):
            Judge(judge(server.url, timeout=60.0)).verdicts(["p"], [["a", "b"]], 0, ["row 1"])
        assert time.monotonic() - began < 10 and len(server.asked) == 2
    assert not [thread for thread in threading.enumerate() if not thread.daemon and "alignment" in thread.name]


def test_refusals_and_unreadable_answers_give_no_verdict_and_no_retry(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [Answer("0", refusal="I cannot"), Answer("1"), Answer("none of them"), Answer("1"), Answer(None)]
    with serving(sequence(*answers, Answer("0"), Answer("1"), Answer("0"))) as server:
        assert judge(server.url, concurrency=1).judge(["p"] * 4, [["a", "b"]] * 4) == [-1, -1, -1, 1]
        assert len(server.asked) == 8
    assert capsys.readouterr().out == ""


GOOD, BUSY, NONE = Answer("0"), Answer(status=500), Answer(status=400, body=b'{"error": {"message": "too long"}}')
STRANGE, BROKEN = Answer(body=b"[]"), Answer(status=403)


@pytest.mark.parametrize(
    ("before", "answers", "verdicts"),
    [
        ([], [BUSY], "error"), ([GOOD], [BUSY], "error"), ([], [NONE], "error"), ([GOOD], [NONE], [-1]),
        ([], [NONE, GOOD], "error"), ([], [GOOD, BUSY], [0, -1]), ([], [GOOD, STRANGE, GOOD], [0, -1, 0]),
        ([], [GOOD, BROKEN], "error"), ([], [GOOD, NONE, GOOD], [0, -1, 0]), ([], [STRANGE], "error"),
    ],
)  # fmt: skip
def test_an_endpoint_that_fails_ends_the_run_and_an_unanswered_question_does_not(
    before: list[Answer], answers: list[Answer], verdicts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A question may be at fault itself (``NONE``) only once the endpoint has ever answered."""
    with serving(sequence(*before, *answers)) as server:
        one = judge(server.url, concurrency=1, retries=0, both_orders=False)
        for number, part in enumerate(part for part in (before, answers) if part):
            pairs = [["a", "b"]] * len(part)
            if verdicts == "error" and part is answers:
                with pytest.raises(RewardError, match=f"^judge m at {server.url}: .*(HTTP|Error)"):
                    one.judge(["p"] * len(part), pairs, shuffle_order=False)
                return
            found = one.judge(["p"] * len(part), pairs, shuffle_order=False)
            assert found == (verdicts if part is answers else [0]), number
    assert "failed, so their pairs get no verdict" in capsys.readouterr().out


def test_a_question_that_fails_before_others_are_answered_ends_no_run() -> None:
    def slow_but_good(text: str) -> Answer:
        return BUSY if "bad" in text else GOOD._replace(wait=0.2)

    with serving(slow_but_good) as server:
        one = judge(server.url, retries=0, both_orders=False)
        assert one.judge(["bad", "p", "q"], [["a", "b"]] * 3, shuffle_order=False) == [-1, 0, 0]


def test_an_endpoint_that_answers_nothing_raises_an_error_with_its_url() -> None:
    with serving(sequence(Answer(status=503, body=b'{"error": {"message": "starting"}}'))) as server:
        with pytest.raises(RewardError, match=rf"judge m at {server.url}: HTTP 503: .*starting"):
            judge(server.url, concurrency=2).judge(["p"] * 10, [["a", "b"]] * 10)
        assert len(server.asked) <= 8  # the others were not sent, which would have taken their retries
        url = server.url
    again = Retries(3, 60.0)  # are not for a judge that has retried
    with pytest.raises(RewardError, match=rf"judge m at {url}: APIConnectionError.*\(judging row 7\)"):
        Judge(judge(url, retries=0), retries=again).verdicts(["p"], [["a", "b"]], 0, ["row 7"])


@pytest.mark.parametrize("status", [302, 307, 401, 402, 403, 404])
def test_permanent_errors_are_not_retried(status: int) -> None:
    with serving(sequence(Answer(status=status, body=b'{"error": {"message": "no"}}'))) as server:
        with pytest.raises(RewardError, match=f"HTTP {status}"):
            judge(server.url, concurrency=1, api_key_env="JUDGE_KEY").judge(["p"] * 4, [["a", "b"]] * 4)
        assert len(server.asked) <= 2  # the next question may have been sent meanwhile


def test_the_key_is_sent_to_the_endpoint_only_and_never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving(longer) as server:
        one = judge(server.url, api_key_env="JUDGE_KEY")
        one.judge(["p"], [["a", "bb"]])
        assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert KEY not in repr(vars(one)) + json.dumps(one.identity)
    for status in (401, 500):
        body = json.dumps({"error": {"message": f"bad key {KEY}"}}).encode()
        with serving(sequence(Answer(status=status, body=body))) as server, pytest.raises(RewardError) as raised:
            judge(server.url, api_key_env="JUDGE_KEY", retries=0).judge(["p"], [["a", "bb"]])
        assert KEY not in str(raised.value)
    with serving(longer) as other:
        away = Answer(status=307, body=b"{}", headers=(("Location", f"{other.url}/chat/completions"),))
        with serving(sequence(away)) as server, pytest.raises(RewardError, match="HTTP 307"):
            judge(server.url, api_key_env="JUDGE_KEY").judge(["p"], [["a", "bb"]])
        assert not other.headers and server.headers
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\nx")
    with pytest.raises(RewardError, match="JUDGE_KEY") as raised:
        judge("http://localhost:1/v1", api_key_env="JUDGE_KEY").judge(["p"], [["a", "bb"]])
    assert KEY not in str(raised.value)


@pytest.mark.parametrize(
    ("most", "both", "asked"),
    [(None, True, 6), (6, True, 6), (5, True, 4), (1, True, 0), (3, False, 3), (2, False, 2)],
)
def test_requests_are_limited(most: int | None, both: bool, asked: int, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(longer) as server:
        one = judge(server.url, max_requests=most, both_orders=both)
        told = asked < (6 if both else 3)
        count = asked // (2 if both else 1)
        assert one.judge(["p"] * 3, [["a", "bb"]] * 3) == [1] * count + [-1] * (3 - count)
        assert len(server.asked) == asked and capsys.readouterr().out.count("max_requests=") == told
        assert one.judge(["p"], [["a", "bb"]]) == [1 if most is None else -1]
        assert capsys.readouterr().out.count("max_requests=") == (most is not None and not told), "once"


def test_an_endpoint_is_checked_before_training_and_once_in_a_dry_run() -> None:
    with serving(sequence(Answer(status=503), Answer("anything"))) as server:
        judge(server.url).check()
        assert Judge(judge(server.url)).looked_at() == [f"judge m at {server.url}: available"]
    with pytest.raises(RewardError, match="APIConnectionError"):
        judge(server.url, retries=1).check()
    (line,) = Judge(judge(server.url, retries=900)).looked_at()
    assert line.startswith(f"judge m at {server.url}: APIConn") and line.endswith("A run would stop with this error")
    assert Judge(lambda prompts, pairs: []).looked_at() == []


def judge_of(given: Any, option: Any) -> Any:
    """Return the judge of a constructor's argument and the value of the option."""
    options: Any = SimpleNamespace(judge=option, check_judge=lambda name: None)
    return given_judge(given, options, None, [], None)


URL = {"model": "m", "base_url": "http://host/v1"}


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"model": "m"}, "base_url"), (URL | {"model": ""}, "model"),
        (URL | {"api_key": KEY}, "api_key: secrets"),
        (URL | {"retrys": 3}, "retrys"), (URL | {"retries": "x"}, "retries"), (URL | {"timeout": 0}, "timeout"),
        (URL | {"max_tokens": True}, "max_tokens"), (URL | {"max_requests": 0}, "max_requests"),
        *((URL | {"base_url": url}, "base_url") for url in ("localhost:8000", "http://", "http://h:99999",
          "http://h/#a", "http://user:pass@host/v1", "http://:pass@host/v1", "http://host/v1?api_key=pass@", "ftp://host/v1")),
        ("hf", "HfPairwiseJudge: not supported; use LLMJudge"),
        ("pair_rm", "PairRMJudge: not supported; use LLMJudge"),
        ("openai", "gpt-4-turbo-preview at https"),
    ],
)  # fmt: skip
def test_invalid_judge_options(given: Any, key: str) -> None:
    with pytest.raises(OptionError) as raised:
        judge_of(None, given)
    said = str(raised.value)
    assert said.startswith(f"judge: {key}") and "pass@" not in said and KEY not in said


def test_valid_judge_options(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"model": "m", "base_url": "http://host:1/v1/", "retries": 0}'
    made = judge_of(None, METHODS["online_dpo"](output_dir="x", judge=text).judge)
    assert isinstance(made, LLMJudge) and made.base_url == "http://host:1/v1" and made.settings.retries == 0
    monkeypatch.setenv("OPENAI_BASE_URL", "http://host:2/v1")
    trls = OpenAIPairwiseJudge()
    assert trls.where == "gpt-4-turbo-preview at http://host:2/v1" and trls.settings.max_requests == 1000
    assert judge_of(trls, "openai") is trls and isinstance(judge_of(None, "openai"), OpenAIPairwiseJudge)
    with pytest.raises(OptionError, match="set both"):
        judge_of(made, "openai")
    with pytest.raises(OptionError, match="HfPairwiseJudge: not supported"):
        HfPairwiseJudge("any", token="thing")
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(OptionError, match=r"pip install 'deepspeed-alignment\[judges\]'"):
        judge_of(None, URL)


def test_defaults_in_the_guide() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "rewards.md").read_text(encoding="utf-8")
    rows = page.partition("\n| key | default |")[2].partition("\n\n")[0].splitlines()[2:]
    written = {row.split("|")[1].strip(" `"): row.split("|")[2].strip(" `") for row in rows}
    unset = {"system_prompt": "built in", "max_requests": "unlimited", "extra_body": "none"}
    fields = JudgeSettings.model_fields
    assert written.keys() == fields.keys() - {"model", "base_url"}
    for name, text in written.items():
        default = fields[name].default
        shown = f"{default:g}" if isinstance(default, float) else str(default).replace("True", "true")
        assert text == unset.get(name, shown), name


def test_a_run_resumes_with_the_same_judge_at_any_url() -> None:
    places = (("m", "http://a/v1"), ("m", "http://b/v1"), ("n", "http://a/v1"))
    same, moved, other = (LLMJudge(*place) for place in places)
    assert code_fingerprint(same) == code_fingerprint(moved) != code_fingerprint(other)
