"""Judges that query a model: questions, answers, both orders, and endpoints that are busy, broken or unavailable."""

from __future__ import annotations

import json
import re
import time
from email.utils import formatdate
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from judge_server import Answer, sequence, serving

from alignment.checkpoint.fingerprints import code_fingerprint
from alignment.config.errors import OptionError, RewardError
from alignment.config.registry import METHODS
from alignment.online.arguments import given_judge
from alignment.rewards import asking
from alignment.rewards.asking import Broken, Busy, ModelJudge, NoAnswer
from alignment.rewards.endpoint import EndpointJudge, OpenAIPairwiseJudge, retry_after
from alignment.rewards.hub_judges import HfPairwiseJudge, PairRMJudge
from alignment.rewards.judges import Judge
from alignment.rewards.pairwise import AllTrueJudge, BaseBinaryJudge
from alignment.rewards.questions import check_instruction, filled_in, read_verdict

KEY = "sk-secret-0123456789"
RESPONSES = re.compile(r'<response id="[01]">\n(.*?)\n</response>', re.DOTALL)


def longer(text: str) -> Answer:
    """A judge that prefers the longer response, regardless of its position."""
    first, second = RESPONSES.findall(text)
    return Answer("0" if len(first) > len(second) else "1")


def judge(url: str, **given: Any) -> EndpointJudge:
    return EndpointJudge("m", url, **{"pause": 0.01, "retries": 2, "timeout": 5.0, **given})


def asked(one: EndpointJudge, pairs: int = 1) -> list[int]:
    return one.judge(["p"] * pairs, [["long one", "short"], ["b", "bb"]] * (pairs // 2) + [["a", ""]] * (pairs % 2))


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("0", 0),
        ("1", 1),
        (" 1\n", 1),
        ('"0".', 0),
        ("**1**\n\nBecause it answers", 1),
        ("<think>0 is short, so 1? No.</think>\n\n0", 0),
        ("1. Response 0 is better", -1),
        ("-1", -1),
        ("\N{MINUS SIGN}1", -1),
        ("10", -1),
        ("2", -1),
        ("Response 1", -1),
        ("I cannot compare these", -1),
        ("", -1),
        (None, -1),
    ],
)
def test_parsing_of_answers(answer: str | None, verdict: int) -> None:
    assert read_verdict(answer) == verdict


def test_instructions() -> None:
    own = check_instruction("{{x}} {prompt}|{response0}|{response1}")
    assert filled_in(own, "{p}", "{0}", "}") == "{x} {p}|{0}|}"
    with pytest.raises(OptionError, match=r"it does not contain \{response1\}"):
        check_instruction("{prompt} {response0}")
    for bad in (
        "{response0} {response1} {prompt.__class__}",
        "{response0!r} {response1}",
        "{response0} {response1} {}",
    ):
        with pytest.raises(OptionError, match="only"):
            check_instruction(bad)
    with pytest.raises(OptionError, match="write a literal brace as"):
        check_instruction("{response0} {response1} {")


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
        shown = {tuple(RESPONSES.findall(text)) for text in server.asked}
        assert len(server.asked) == 20 and len(shown) == 4
        del server.asked[:]
        one.judge(["p"] * 5, [["a", "bb"]] * 5, shuffle_order=False)
        assert {tuple(RESPONSES.findall(text)) for text in server.asked} == {("a", "bb")}


def test_conversations_are_sent_as_text() -> None:
    with serving(longer) as server:
        prompt = [{"role": "user", "content": "Hi"}]
        pair = [[{"role": "assistant", "content": text}] for text in ("Hello", "Oh")]
        assert Judge(judge(server.url)).verdicts([prompt], [pair], 0, ["row 1"]) == [0]
        assert "<prompt>\nuser: Hi\n</prompt>" in server.asked[0] and sorted(RESPONSES.findall(server.asked[0])) == [
            "Hello",
            "Oh",
        ]


@pytest.mark.parametrize(
    "trouble",
    [
        Answer(status=500, body=b'{"error": {"message": "overloaded"}}'),
        Answer(status=429, body=b"{}", headers=(("Retry-After", "0.05"),)),
        Answer(status=0),  # closes the connection
        Answer("0", cut=True),
        Answer(body=b"<html>"),
        Answer(body=b"[]"),
        Answer("0", wait=1.0),  # slower than the timeout
    ],
)
def test_transient_errors_are_retried(trouble: Answer) -> None:
    with serving(sequence(trouble, Answer("1"), trouble, Answer("0"))) as server:
        one = judge(server.url, concurrency=1, timeout=0.2)
        assert one.judge(["p"], [["a", "bb"]]) == [1]
        assert len(server.asked) == 4 and server.asked[0] == server.asked[1] != server.asked[2]


def test_a_slow_response_times_out() -> None:
    with (
        serving(sequence(Answer("0", drip=0.02))) as server,
        pytest.raises(RewardError, match="no complete response within"),
    ):
        judge(server.url, concurrency=2, timeout=0.2, retries=0).judge(["p"], [["a", "b"]])


def test_no_retries_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Hanging(EndpointJudge):
        def ask(self, text: str) -> str | None:
            calls.append(text)
            raise Busy("not now")

    def interrupted() -> None:
        if calls:
            raise KeyboardInterrupt

    monkeypatch.setattr(asking, "_LOOK_S", 0.01)
    monkeypatch.setattr(asking.ACTIVITY, "progress", interrupted)
    with pytest.raises(KeyboardInterrupt):
        asked(Hanging("m", "http://localhost:1/v1", pause=30, retries=3, concurrency=1), 2)
    assert len(calls) == 1


def test_refusals_and_unreadable_answers_give_no_verdict_and_no_retry(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [Answer("0", refusal="I cannot"), Answer("1"), Answer("none of them"), Answer("1"), Answer(None)]
    with serving(sequence(*answers, Answer("0"), Answer("1"), Answer("0"))) as server:
        assert judge(server.url, concurrency=1).judge(["p"] * 4, [["a", "b"]] * 4) == [-1, -1, -1, 1]
        assert len(server.asked) == 8
    assert capsys.readouterr().out == ""


def test_retry_after_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert retry_after("7") == 7 and retry_after(None) is retry_after("soon") is None and retry_after("-1") == 0
    assert 50 < (retry_after(formatdate(time.time() + 60, usegmt=True)) or 0) <= 60
    busy = Answer(status=429, body=b"{}", headers=(("Retry-After", "0.3"),))
    with serving(sequence(busy, Answer("1"), Answer("0"))) as server:
        start = time.monotonic()
        assert judge(server.url, concurrency=1, pause=0.0).judge(["p"], [["a", "bb"]]) == [1]
        assert time.monotonic() - start >= 0.3 and len(server.asked) == 3


@pytest.mark.parametrize(("after", "pauses"), [(None, [50, 100, 200, 300, 300]), (7.0, [7] * 5), (1000.0, [300] * 5)])
def test_pauses_between_questions_double(after: float | None, pauses: list[float]) -> None:
    class Never(EndpointJudge):
        def ask(self, text: str) -> str | None:
            raise Busy("not now", after)

    waited: list[float] = []
    together: Any = asking._Round()
    together.ended, together.pause = SimpleNamespace(wait=waited.append), waited.append
    with pytest.raises(Busy, match="not now, after 5 retries"):
        Never("m", "http://localhost:1/v1", pause=50, retries=5)._repeated("?", together)
    assert waited == pauses


def test_which_statuses_are_retried() -> None:
    kinds = {Busy: (408, 409, 425, 429, 500, 503), Broken: (302, 401, 403, 404), NoAnswer: (400, 413, 422)}
    for kind, statuses in kinds.items():
        for status in statuses:
            with serving(sequence(Answer(status=status, body=b"{}"))) as server:
                with pytest.raises(NoAnswer, match=f"HTTP {status}") as raised:
                    judge(server.url).ask("?")
                assert type(raised.value) is kind, status


def test_an_endpoint_that_answers_nothing_raises_an_error_with_its_url() -> None:
    with serving(sequence(Answer(status=503, body=b'{"error": "starting"}'))) as server:
        one = judge(server.url, concurrency=2)
        said = (
            rf"judge m at {server.url}: 20 of 20 questions were not answered: HTTP 503 \(starting\), after 2 retries"
        )
        with pytest.raises(RewardError, match=said):
            one.judge(["p"] * 10, [["a", "b"]] * 10)
        assert len(server.asked) <= 6  # the others were not sent, which would have taken their retries
        url = server.url
    with pytest.raises(RewardError, match=rf"judge m at {url}: 2 of 2 .* ConnectionRefusedError.*\(judging row 7\)"):
        Judge(judge(url, retries=0)).verdicts(["p"], [["a", "b"]], 0, ["row 7"])


@pytest.mark.parametrize(("status", "said"), [(401, "set JUDGE_KEY to an API key"), (404, "check base_url and model")])
def test_permanent_errors_are_not_retried(status: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with serving(sequence(Answer(status=status, body=b'{"error": {"message": "no"}}'))) as server:
        with pytest.raises(RewardError, match=f"HTTP {status}.*{said}"):
            asked(judge(server.url, concurrency=1, api_key_env="JUDGE_KEY"), 4)
        assert len(server.asked) == 1


def test_a_failed_question_only_affects_its_pair(capsys: pytest.CaptureFixture[str]) -> None:
    def short_ones(text: str) -> Answer:
        return longer(text) if len(text) < 2000 else Answer(status=400, body=b'{"error": {"message": "too long"}}')

    with serving(short_ones) as server:
        one = judge(server.url)
        with pytest.raises(RewardError, match=r"2 of 2 questions were not answered: HTTP 400 \(too long\)"):
            one.judge(["p"], [["a" * 2000, "b"]])  # no question was ever answered, so the request itself may be wrong
        assert one.judge(["p"] * 2, [["a", "bb"], ["a" * 2000, "b"]]) == [1, -1]
        assert one.judge(["p"], [["a" * 2000, "b"]]) == [-1]
    assert (
        f"judge m at {server.url}: 2 of 4 questions were not answered: HTTP 400 (too long); "
        in capsys.readouterr().out
    )


def test_the_key_is_sent_but_never_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving(longer) as server:
        one = judge(server.url, api_key_env="JUDGE_KEY")
        asked(one)
        assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert KEY not in repr(vars(one)) + json.dumps(one.identity)
    for status in (401, 500):
        body = json.dumps({"error": {"message": f"bad key {KEY}"}}).encode()
        with serving(sequence(Answer(status=status, body=body))) as server:
            with pytest.raises(RewardError) as raised:
                asked(judge(server.url, api_key_env="JUDGE_KEY", retries=0))
            assert KEY not in str(raised.value)
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\nx")
    with (
        pytest.raises(RewardError, match="the key in JUDGE_KEY contains invalid characters") as raised,
        serving(longer) as server,
    ):
        asked(judge(server.url, api_key_env="JUDGE_KEY"))
    assert KEY not in str(raised.value)


@pytest.mark.parametrize("status", [302, 307])
def test_a_key_is_not_sent_to_a_redirect(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving(longer) as other:
        away = Answer(status=status, body=b"{}", headers=(("Location", f"{other.url}/chat/completions"),))
        with serving(sequence(away)) as server, pytest.raises(RewardError, match=f"HTTP {status}"):
            asked(judge(server.url, api_key_env="JUDGE_KEY"))
        assert not other.headers and server.headers


def test_requests_are_limited(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(longer) as server:
        one = judge(server.url, max_requests=5)
        assert one.judge(["p"] * 3, [["a", "bb"]] * 3) == [1, 1, -1]
        assert one.judge(["p"], [["a", "bb"]]) == [-1] and len(server.asked) == 4
    assert capsys.readouterr().out.count("max_requests=5 is reached") == 1


def test_additional_keys_of_a_request() -> None:
    with serving(longer) as server:
        asked(judge(server.url, extra_body={"max_tokens": None, "max_completion_tokens": 9, "seed": 1}))
        body = server.bodies[0]
        assert "max_tokens" not in body and body["max_completion_tokens"] == 9 and body["seed"] == 1


def test_an_endpoint_is_checked_before_training() -> None:
    models = Answer(body=b'{"data": [{"id": "other"}]}')
    with serving(longer, models) as server, pytest.raises(RewardError, match="it serves other; set model to one"):
        judge(server.url).check()
    for fine in (None, Answer(body=b'{"data": [{"id": "m"}]}'), Answer(body=b'{"data": []}'), Answer(body=b"[]")):
        with serving(longer, fine) as server:
            judge(server.url).check()
    with serving(longer, Answer(status=401, body=b"{}")) as server, pytest.raises(RewardError, match="HTTP 401"):
        judge(server.url).check()
    with pytest.raises(RewardError, match="ConnectionRefusedError"):
        judge(server.url, retries=1).check()


def test_a_dry_run_checks_the_endpoint_once() -> None:
    with serving(longer, Answer(body=b'{"data": []}')) as server:
        assert Judge(judge(server.url)).looked_at() == [f"judge m at {server.url}: available"]
    (line,) = Judge(judge(server.url, retries=9, pause=60)).looked_at()
    assert line.startswith(f"judge m at {server.url}: ConnectionRefusedError") and line.endswith(
        "A run would stop with this error"
    )
    assert Judge(lambda prompts, pairs: []).looked_at() == []


def judge_of(given: Any, option: Any) -> Any:
    """Return the judge of a constructor's argument and the value of the option."""
    options: Any = SimpleNamespace(judge=option, check_judge=lambda name: None)
    return given_judge(given, options, None, [], None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "m"}, "base_url is missing"),
        ({"model": "m", "base_url": "localhost:8000"}, "not an HTTP URL"),
        ({"model": "m", "base_url": "http://user:pass@host/v1"}, "store an API key in the environment variable"),
        ({"model": "m", "base_url": "http://host/v1?api_key=x"}, "store an API key in the environment variable"),
        ({"model": "", "base_url": "http://host/v1"}, "model=''"),
        ({"model": "m", "base_url": "http://host/v1", "api_key": KEY}, "set api_key_env to its name"),
        ({"model": "m", "base_url": "http://host/v1", "retrys": 3}, "did you mean 'retries'"),
        ({"model": "m", "base_url": "http://host/v1", "retries": "x"}, "retries='x': expected an integer"),
        ({"model": "m", "base_url": "http://host/v1", "timeout": 0}, "timeout=0: expected a number"),
        ({"model": "m", "base_url": "http://host/v1", "both_orders": 2}, "both_orders=2: expected true or false"),
        ({"model": "m", "base_url": "http://host/v1", "extra_body": []}, "extra_body="),
    ],
)
def test_invalid_judge_options(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match="^judge: .*") as raised:
        judge_of(None, given)
    assert said in str(raised.value) and "pass@" not in str(raised.value) and KEY not in str(raised.value)


def test_valid_judge_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options = METHODS["online_dpo"](
        output_dir="x", judge='{"model": "m", "base_url": "http://host:1/v1/", "retries": 0}'
    )
    made = judge_of(None, options.judge)
    assert isinstance(made, EndpointJudge) and made.base_url == "http://host:1/v1" and made.retries == 0
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(OptionError, match="OPENAI_API_KEY is not set"):
        judge_of(None, "openai")
    with pytest.raises(OptionError, match="pip install llm-blender"):
        judge_of(None, "pair_rm")
    own = judge_of(None, "hf")
    assert isinstance(own, HfPairwiseJudge) and judge_of(own, "hf") is own
    with pytest.raises(OptionError, match="set both"):
        judge_of(own, "openai")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://host:2/v1")
    assert OpenAIPairwiseJudge().where == "gpt-4-turbo-preview at http://host:2/v1"


def test_defaults_in_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "rewards.md").read_text(encoding="utf-8")
    rows = page.partition("\n| key | default |")[2].partition("\n\n")[0].splitlines()[2:]
    written: dict[str, str] = {}
    for names, defaults in (row.split("|")[1:3] for row in rows):
        written.update(zip(re.findall(r"`(\w+)`", names), defaults.replace("`", "").strip().split(", "), strict=True))
    unset = {"system_prompt": "built in", "max_requests": "unlimited", "extra_body": "none"}
    parameters = {**signature(ModelJudge.__init__).parameters, **signature(EndpointJudge.__init__).parameters}
    assert written.keys() == parameters.keys() - {"self", "model", "base_url", "asking"}
    for name, text in written.items():
        default = parameters[name].default
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        assert text == (unset[name] if default is None else "true" if default is True else shown), name
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    trls = OpenAIPairwiseJudge()
    assert (trls.base_url, trls.max_requests) == ("https://api.openai.com/v1", 1000)


def test_a_run_resumes_with_the_same_judge_at_any_url() -> None:
    same, moved, other = (
        EndpointJudge(m, u) for m, u in (("m", "http://a/v1"), ("m", "http://b/v1"), ("n", "http://a/v1"))
    )
    assert code_fingerprint(same) == code_fingerprint(moved) != code_fingerprint(other)


def test_the_inference_client_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the server runs on this machine
    with serving(longer) as server:
        one = HfPairwiseJudge(server.url.removesuffix("/v1"), token=KEY, pause=0.01, retries=1)
        assert one.judge(["p"] * 2, [["a", "bb"], ["ccc", "c"]]) == [1, 0]
        assert KEY not in json.dumps(one.identity) + one.where
    with serving(sequence(Answer(status=500, body=b"{}"), Answer("1"), Answer("0"))) as server:
        one = HfPairwiseJudge(server.url.removesuffix("/v1"), token=KEY, pause=0.01, retries=1, concurrency=1)
        assert one.judge(["p"], [["a", "bb"]]) == [1] and len(server.asked) == 3
    with serving(sequence(Answer(status=401, body=b"{}"))) as server:
        with pytest.raises(RewardError, match="HTTP 401; pass a token"):
            HfPairwiseJudge(server.url.removesuffix("/v1"), token=KEY, pause=0.01).judge(["p"], [["a", "bb"]])


class Blender:
    """The interface of llm-blender: ranks from 1, or scores of each candidate."""

    def loadranker(self, name: str, device: str) -> None:
        assert name == "llm-blender/PairRM" and device

    def rank(self, prompts: list[str], pairs: list[list[str]], return_scores: bool, disable_tqdm: bool) -> Any:
        sizes = np.array([[len(text) for text in pair] for pair in pairs])
        return sizes.astype(float) if return_scores else (sizes.argsort()[:, ::-1].argsort() + 1)


def test_pair_rm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llm_blender", SimpleNamespace(Blender=Blender, __spec__=object()))
    one, pairs = PairRMJudge(), [["long one", "short"], ["b", "bb"]] * 10
    np.random.seed(0)
    assert one.judge(["p"] * 20, pairs) == [0, 1] * 10
    likely = one.judge(["p"] * 20, pairs, return_scores=True, temperature=2.0)
    assert likely == pytest.approx([1 / (1 + np.exp(-1.5)), 1 / (1 + np.exp(0.5))] * 10)


def test_judges_of_single_completions() -> None:
    class Says(BaseBinaryJudge):
        def __init__(self, *verdicts: int) -> None:
            self.verdicts = list(verdicts)

        def judge(
            self, prompts: Any, completions: Any, gold_completions: Any = None, shuffle_order: bool = True
        ) -> Any:
            return self.verdicts

    assert AllTrueJudge([Says(1, 1, -1, 0), Says(1, 0, 0, 0)]).judge(["p"] * 4, ["c"] * 4) == [1, 0, -1, 0]
    with pytest.raises(ValueError, match="2 .an integer."):
        AllTrueJudge([Says(2), Says(1)]).judge(["p"], ["c"])
    with pytest.raises(OptionError, match="does not compare pairs"):
        Judge(Says(1))
