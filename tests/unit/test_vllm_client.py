"""The client of vLLM's server against one that follows its protocol: responses, faults, and what to do about them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_vllm import GENERATE, FakeVLLM, Fault
from support.helpers import make_model

from alignment.config.errors import OptionError, TrainingError
from alignment.rollout.backend import Sampling
from alignment.rollout.vllm.client import Client
from alignment.rollout.vllm.support import sampling_params
from alignment.run.stop import REQUESTS, Cut, StopReason

SECRET = "sk-hidden-0123"
PARAMS = sampling_params(Sampling(6, (1,), 0, temperature=0.7), 3, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture
def server(model: str) -> Iterator[FakeVLLM]:
    with FakeVLLM(model).running() as server:
        yield server


@pytest.fixture
def client(server: FakeVLLM) -> Iterator[Client]:
    made = Client(server.url, 2.0, "")
    yield made
    made.close()


def request(*prompt: int, model: str = "base") -> dict[str, Any]:
    return {"token_ids": list(prompt), "model": model, "sampling_params": PARAMS}


def test_choices_are_in_the_order_of_prompts_and_indices(server: FakeVLLM, client: Client) -> None:
    prompts = [(0, 5, number) for number in range(9)]
    found = client.generate([request(*prompt) for prompt in prompts])
    for prompt, group in zip(prompts, found, strict=True):
        ((_, answer),) = [(0, server.answer(GENERATE, "", request(*prompt))[1]["choices"])]
        expected = sorted(answer, key=lambda choice: choice["index"])
        assert [list(choice.ids) for choice in group] == [choice["token_ids"] for choice in expected]
        assert [len(choice.logps) for choice in group] == [len(choice.ids) for choice in group]
        assert {choice.versions for choice in group} == {("default",)}
    assert client.generate([]) == []


def test_what_the_server_is(server: FakeVLLM, client: Client) -> None:
    client.set_version("a-1")
    info = client.info()
    assert (info.model, info.root, info.max_length) == ("base", server.folder, 64)
    assert client.state() == ("a-1", False, False)
    assert info.config["lora_config"]["max_lora_rank"] == 16
    client.sleep(2)
    assert client.state() == ("a-1", True, False)
    client.wake()
    assert client.state() == ("a-1", False, False)


def test_an_adapter_whose_first_response_was_lost_is_loaded(server: FakeVLLM, client: Client, tmp_path: Path) -> None:
    path = "/v1/load_lora_adapter"
    server.adapters["mine"] = str(tmp_path), None
    client.load_adapter("mine", tmp_path)  # the server says that it is loaded, and it is the same
    with pytest.raises(TrainingError, match="already been loaded"):
        client.load_adapter("mine", tmp_path / "other")
    with pytest.raises(TrainingError, match="No adapter found"):
        client.load_adapter("new", tmp_path)
    client.unload_adapter("mine")
    client.unload_adapter("mine")  # it is gone
    assert server.adapters == {} and server.paths(path) == [path] * 3


@pytest.mark.parametrize(
    "fault", [Fault(), Fault(500, "broken"), Fault(503, "busy")], ids=["lost connection", "HTTP 500", "HTTP 503"]
)
def test_a_fault_that_passes_is_retried(server: FakeVLLM, client: Client, fault: Fault) -> None:
    server.fault = lambda path, number: fault if number < 2 else None
    (group,) = client.generate([request(0, 4)])
    assert len(group) == 3 and server.paths() == [GENERATE] * 3


@pytest.mark.parametrize("fault", [Fault(), Fault(500, "broken"), Fault(200, wait=60)], ids=["lost", "500", "hangs"])
def test_a_fault_that_stays_ends_after_the_timeout(server: FakeVLLM, fault: Fault) -> None:
    client, began = Client(server.url, 1.0), time.monotonic()
    server.fault = lambda path, number: fault
    with pytest.raises(TrainingError, match="vllm_server_timeout=1.0") as caught:
        client.generate([request(0, 4)])
    assert 1 <= time.monotonic() - began < 4 and server.url in str(caught.value)


def test_a_server_that_does_not_run(capfd: pytest.CaptureFixture[str]) -> None:
    client = Client("http://127.0.0.1:9", 1.5)
    with pytest.raises(TrainingError, match="ConnectError.*vllm-serve RECIPE"):
        client.info()
    assert capfd.readouterr().out.count("trying again") == 1, "the user sees for what the run waits"


def test_a_long_rollout_of_a_server_that_answers_is_no_timeout(server: FakeVLLM) -> None:
    client = Client(server.url, 1.5)
    server.fault = lambda path, number: Fault(200, wait=0.6 * (number + 1)) if number < 4 else None
    assert len(client.generate([request(0, number) for number in range(4)])) == 4


def missing(flag: str) -> Callable[[FakeVLLM], None]:
    return lambda server: server.flags.discard(flag)


@pytest.mark.parametrize(
    ("change", "call", "expected"),
    [
        (missing("scale-out"), lambda c: c.generate([request(0)]), "--enable-scale-out"),
        (missing("dev"), Client.info, "VLLM_SERVER_DEV_MODE=1"),
        (missing("dev"), lambda c: c.reload(Path("/nowhere")), "VLLM_SERVER_DEV_MODE=1"),
        (missing("lora"), lambda c: c.load_adapter("a", Path("/a")), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (lambda server: setattr(server, "trl", True), Client.info, "trl vllm-serve.*vllm-serve RECIPE"),
        (lambda server: setattr(server, "key", SECRET), Client.info, "VLLM_API_KEY"),
        (lambda server: None, lambda c: c.generate([request(0, model="gone")]), "`gone`.*restarted"),
        (lambda server: None, lambda c: c.generate([request(*range(60))]), "maximum context length"),
    ],
    ids=["scale-out", "info", "reload", "lora", "trl", "key", "model", "length"],
)  # fmt: skip
def test_what_is_refused_is_not_repeated(
    server: FakeVLLM, client: Client, change: Callable[[FakeVLLM], None], call: Callable[[Client], Any], expected: str
) -> None:
    change(server)
    began = time.monotonic()
    with pytest.raises(TrainingError, match=expected):
        call(client)
    assert time.monotonic() - began < 1.5 and len(server.requests) <= 3


def test_no_message_contains_the_key(
    server: FakeVLLM, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    server.key = SECRET
    client = Client(server.url, 1.0)
    assert client.info().model == "base", "the key was sent"
    messages = [repr(client)]
    for fault in (Fault(500, f"key {SECRET}"), Fault(400, f"key {SECRET}"), Fault(401, SECRET)):
        server.fault = lambda path, number, fault=fault: fault
        with pytest.raises(TrainingError, match="HTTP") as caught:
            client.generate([request(0)])
        messages.append(str(caught.value))
    assert SECRET not in "".join(messages) + "".join(capfd.readouterr())
    with pytest.raises(OptionError, match="VLLM_API_KEY") as refused:
        Client(server.url, 1.0, f"{SECRET}\n")
    assert SECRET not in str(refused.value)


def test_a_completion_that_was_aborted_is_not_used(server: FakeVLLM, client: Client) -> None:
    server.edit = lambda answer: answer["choices"][0].update(finish_reason="abort")
    with pytest.raises(TrainingError, match="'abort'"):
        client.generate([request(0)])


def test_requests_are_dropped_once_a_stop_is_requested(server: FakeVLLM, client: Client) -> None:
    server.fault = lambda path, number: Fault(200, wait=60)
    began = time.monotonic()
    with REQUESTS.deferred(None), pytest.raises(Cut):
        REQUESTS.request(StopReason.SIGTERM)
        client.generate([request(0, number) for number in range(3)])
    REQUESTS.forget()
    assert time.monotonic() - began < 5


def test_a_call_ends_soon_once_a_stop_is_requested(server: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    client, began = Client(server.url, 300.0), time.monotonic()
    monkeypatch.setattr("alignment.rollout.vllm.client._STOPPING_S", 1.0)
    server.fault = lambda path, number: Fault(500)
    with REQUESTS.deferred(None), pytest.raises(TrainingError, match="has to stop"):
        REQUESTS.request(StopReason.SIGTERM)
        client.pause()
    REQUESTS.forget()
    assert time.monotonic() - began < 10
