"""Online DPO with completions from a server that follows vLLM's protocol: weights, versions, faults, and stops."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_vllm import GENERATE, RESTART, FakeVLLM, Fault
from support.helpers import Acts, make_model, train_and_close
from support.vllm_runs import make
from support.whole_runs import completions

from alignment.checkpoint.folder import checkpoints
from alignment.config.errors import OptionError, TrainingError
from alignment.models.source import ModelSource
from alignment.rollout.vllm.rollout import DIFFERENCE
from alignment.run.stop import REQUESTS, RunStopped

pytestmark = pytest.mark.usefixtures("own_process_group")
UPDATE = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "policy")


@pytest.fixture
def server(model: str) -> Iterator[FakeVLLM]:
    REQUESTS.forget()
    with FakeVLLM(model).running() as server:
        yield server


def run(server: FakeVLLM, folder: Path, *callbacks: Any, **more: Any) -> Any:
    return train_and_close(make(server.url, server.folder, folder, *callbacks, **more))


def versions(server: FakeVLLM) -> list[str]:
    """The versions that were set, in order."""
    return [body["new_version"] for body in server.bodies("/update_weight_version")]


@pytest.mark.parametrize(
    "more",
    [{"memory_rehearsal": "true"}, {"deepspeed": {"zero_optimization": {"stage": 3}}}, LORA, {"dtype": "bfloat16"}],
    ids=["rehearsed", "stage3", "adapters", "bf16"],
)
def test_every_rollout_is_made_by_the_newest_weights(server: FakeVLLM, tmp_path: Path, more: dict[str, Any]) -> None:
    given = {"eval_strategy": "steps", "eval_steps": 1, **more}
    trainer = run(server, tmp_path, **given)
    logged = [entry[DIFFERENCE] for entry in trainer.state.log_history if DIFFERENCE in entry]
    assert len(logged) == 3 and 0 < max(logged) < (0.05 if "dtype" in more else 1e-5)
    assert all(f"eval_{DIFFERENCE}" in entry for entry in trainer.state.log_history if "eval_loss" in entry)
    # The weights of each step are sent once: an evaluation and the next step use the same.
    found = versions(server)
    (series,) = {version.split("-")[0] for version in found}
    assert found == [f"{series}-{step}-{step + 1}" for step in range(4)]
    weights = (
        ["/v1/load_lora_adapter", "/update_weight_version", "/v1/unload_lora_adapter"] if "lora_r" in more else UPDATE
    )
    ordered = server.paths(*weights)
    assert ordered == (weights[:2] + weights * 3 + weights[2:] if "lora_r" in more else UPDATE * 4)
    asked = server.bodies()[1:]  # without that of the start
    assert [body["cache_salt"] for body in asked] == sorted(body["cache_salt"] for body in asked)
    assert {body["cache_salt"] for body in asked} == set(found)
    assert {body["model"] for body in asked} == (set(found) if "lora_r" in more else {"base"})


def test_requests_name_every_setting(server: FakeVLLM, tmp_path: Path) -> None:
    more = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "num_generations": 3}
    more |= {"generation_kwargs": {"min_new_tokens": 2}, "gradient_accumulation_steps": 1}
    run(server, tmp_path, max_steps=2, **more)
    _, *asked = [body for body in server.bodies() if body["sampling_params"]["n"] == 3]
    shared = {"n": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.1,
              "presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": True, "logprobs": 0,
              "detokenize": False, "skip_special_tokens": False}  # fmt: skip
    for body in asked:
        assert {**body["sampling_params"], **shared} == body["sampling_params"]
    own = [body["sampling_params"] for body in asked]
    assert {(each["max_tokens"], each["min_tokens"], tuple(each["stop_token_ids"])) for each in own} == {(6, 2, (1,))}
    seeds = sorted(each["seed"] for each in own)
    assert len(seeds) == 4 and seeds[1] - seeds[0] == seeds[3] - seeds[2] == 3, "vLLM adds 0, 1 and 2 to the seed"


def ignore(server: FakeVLLM) -> None:
    server.ignores_weights = True


def other_version(answer: dict[str, Any]) -> None:
    answer["choices"][0]["weight_versions"][0]["version"] = "other-1"


def mixed_versions(answer: dict[str, Any]) -> None:
    answer["choices"][1]["weight_versions"].append({"version": "other-1", "start": 2, "end": 3})


def no_version(answer: dict[str, Any]) -> None:
    answer["choices"][0]["weight_versions"] = None


def processed(answer: dict[str, Any]) -> None:
    for choice in answer["choices"]:
        for token in choice["logprobs"]["content"]:
            token["logprob"] /= 0.9


# What is wrong from the second rollout on, and what the error names.
FAULTS: dict[str, tuple[Callable[[FakeVLLM], Any], str]] = {
    "stale weights": (ignore, DIFFERENCE),
    "other log-probs": (lambda server: setattr(server, "edit", processed), DIFFERENCE),
    "restarted after the update": (lambda server: setattr(server, "fault", restarting("/weight_info")), "default"),
    "restarted in the rollout": (lambda server: setattr(server, "fault", restarting(GENERATE)), "restarted"),
    "another version": (lambda server: setattr(server, "edit", other_version), "other-1"),
    "mixed versions": (lambda server: setattr(server, "edit", mixed_versions), "other-1"),
    "no version": (lambda server: setattr(server, "edit", no_version), "version none"),
    "sleeps": (lambda server: setattr(server, "sleeping", True), "sleeps"),
    "lost": (lambda server: setattr(server, "fault", lambda path, _: Fault()), "vllm_server_timeout"),
    "HTTP 500": (lambda server: setattr(server, "fault", lambda path, _: Fault(500, "dead")), "HTTP 500: dead"),
    "hangs": (lambda server: setattr(server, "fault", hanging), "no response"),
    "disk full": (lambda server: setattr(server, "fault", refusing), "No space left"),
}


BRIEF = ("stale weights", "restarted in the rollout", "mixed versions", "no version", "sleeps", "lost")


def restarting(where: str) -> Callable[[str, int], Fault | None]:
    """Restart once, at the first request of this path."""
    left = [Fault(RESTART)]
    return lambda path, number: left.pop() if path == where and left else None


def hanging(path: str, number: int) -> Fault | None:
    return Fault(200, wait=60) if path == GENERATE else None


def refusing(path: str, number: int) -> Fault | None:
    return Fault(400, "No space left") if path in ("/collective_rpc", "/v1/load_lora_adapter") else None


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *(pytest.param(n, {}, id=n.replace(" ", "-"), marks=() if n in BRIEF else pytest.mark.ci) for n in FAULTS),
        *(pytest.param(n, LORA, id=f"adapters-{n}".replace(" ", "-"), marks=pytest.mark.ci) for n in list(FAULTS)[:4]),
    ],
)
def test_a_fault_ends_the_run_before_anything_is_trained_on(
    server: FakeVLLM, tmp_path: Path, name: str, more: dict[str, Any]
) -> None:
    act, expected = FAULTS[name]
    more = {**more, "save_strategy": "steps", "save_steps": 1}
    began, fault = time.monotonic(), Acts("on_step_end", 2, lambda: act(server))
    trainer = make(server.url, server.folder, tmp_path, fault, **more)
    with pytest.raises(TrainingError, match=expected) as caught:
        train_and_close(trainer)
    assert server.url in str(caught.value) and time.monotonic() - began < 40
    assert [path.name for path in checkpoints(tmp_path / "out")][-1] == "checkpoint-2"
    assert {line["step"] for line in completions(trainer)} == {1, 2}
    server.restart()
    server.fault, server.edit, server.ignores_weights = lambda path, number: None, lambda answer: None, False
    trainer = make(server.url, server.folder, tmp_path, **more)
    trainer.train(resume_from_checkpoint="latest")
    assert trainer.state.global_step == 3 and {line["step"] for line in completions(trainer)} == {1, 2, 3}
    trainer.close()


def configured(section: str, name: str, value: Any) -> Callable[[FakeVLLM], None]:
    return lambda server: server.config[section].update({name: value})


@pytest.mark.parametrize(
    ("change", "more", "expected"),
    [
        (lambda server: setattr(server, "max_length", 63), {}, "--max-model-len 64"),
        (lambda server: None, {"max_length": 80}, "--max-model-len 80"),
        (configured("scheduler_config", "max_num_seqs", 1), {}, "--max-num-seqs 2"),
        (configured("model_config", "logprobs_mode", "processed_logprobs"), {}, "--logprobs-mode raw_logprobs"),
        (configured("model_config", "logits_processors", ["a:b"]), {}, "--logits-processors"),
        (configured("lora_config", "max_lora_rank", 2), LORA, "--max-lora-rank"),
        (lambda server: server.flags.discard("lora"), LORA, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (lambda server: server.flags.discard("scale-out"), {}, "--enable-scale-out"),
        (lambda server: server.flags.discard("dev"), {}, "VLLM_SERVER_DEV_MODE=1"),
        (lambda server: setattr(server, "trl", True), {}, "trl vllm-serve"),
        (lambda server: setattr(server, "sleeping", True), {}, "sleeps"),
        (lambda server: setattr(server, "paused", True), LORA, "paused"),
        (lambda server: setattr(server, "folder", "/models/other"), {}, "serves /models/other"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_server_that_does_not_suit_is_refused_before_the_policy_is_loaded(
    server: FakeVLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, more: dict[str, Any], expected: str
) -> None:
    trainer = make(server.url, server.folder, tmp_path, **more)
    monkeypatch.setattr(ModelSource, "load", lambda *_: pytest.fail("the policy is loaded"))
    change(server)
    with pytest.raises(TrainingError, match=expected):
        trainer.train()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"temperature": 0.005}, "temperature=0.005"),
        ({"temperature": 2.5}, "temperature=2.5"),
        ({"min_p": 0.1, "top_p": 0.9}, "min_p=0.1 and top_p=0.9"),
        ({"generation_kwargs": {"no_repeat_ngram_size": 2}}, "no_repeat_ngram_size=2"),
        ({**LORA, "use_dora": True}, "use_dora"),
    ],
)
def test_what_vllm_samples_otherwise_is_refused(
    tmp_path: Path, model: str, more: dict[str, Any], expected: str
) -> None:
    with pytest.raises(OptionError, match=f"rollout_backend='vllm': .*{expected}"):
        make("http://127.0.0.1:9", model, tmp_path, **more)


def test_the_best_model_that_is_loaded_at_the_end_is_sent(server: FakeVLLM, tmp_path: Path) -> None:
    """It has as many optimizer steps as the last one, but other weights."""
    more = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "learning_rate": 0.05,
    }
    trainer = make(
        server.url, server.folder, tmp_path, **more, load_best_model_at_end=True, metric_for_best_model="loss"
    )
    trainer.train()
    assert trainer.state.best_global_step not in (None, 3), "otherwise the newest weights are the best ones"
    before = versions(server)
    found = trainer.evaluate()
    assert len(versions(server)) == len(before) + 1 and versions(server)[-1].split("-")[0] != before[-1].split("-")[0]
    assert found[f"eval_{DIFFERENCE}"] < 1e-5
    trainer.close()


def test_another_base_model_on_purpose(server: FakeVLLM, tmp_path: Path) -> None:
    path, server.folder = server.folder, "/models/other"
    ignore(server)
    trainer = train_and_close(make(server.url, path, tmp_path, vllm_allow_base_mismatch=True))
    assert trainer.state.log_history[2][DIFFERENCE] > 0.01, "measured, but allowed"


def test_a_stop_in_a_rollout_saves_the_step_before(server: FakeVLLM, tmp_path: Path) -> None:
    more = {"save_strategy": "steps", "save_steps": 5, "max_steps": 4, "vllm_server_timeout": 100.0}
    count = [0]

    def terminating(path: str, number: int) -> Fault | None:
        count[0] += path == GENERATE
        if path == GENERATE and count[0] == 1 + 2 + 4 + 4 + 1:  # start, baseline, two steps
            os.kill(os.getpid(), signal.SIGTERM)
        return Fault(200, wait=90) if count[0] > 11 else None

    server.fault = terminating
    began = time.monotonic()
    with pytest.raises(RunStopped, match="checkpoint-2 is complete"):
        run(server, tmp_path, **more)
    assert time.monotonic() - began < 30
    REQUESTS.forget()
    server.fault = lambda path, number: None
    trainer = make(server.url, server.folder, tmp_path, **more)
    trainer.train(resume_from_checkpoint="latest")
    assert trainer.state.global_step == 4
    assert len({version.split("-")[0] for version in versions(server)}) == 2, "a resumed run has names of its own"
    trainer.close()


@pytest.mark.parametrize(("more", "level"), [({}, "level=2"), (LORA, "level=1")], ids=["full", "adapters"])
def test_a_colocated_server_sleeps_between_rollouts(
    server: FakeVLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], level: str
) -> None:
    """Full weights are dropped, and sent before each rollout; adapters stay in the memory of the host."""
    running: list[bool] = []

    class Started:
        key = server.key = "sk-secret"

        def __init__(self, *_: Any) -> None: ...

        def start(self) -> str:
            running.append(True)
            return server.url

        def check(self) -> None: ...

        def stop(self) -> None:
            running.append(False)

    monkeypatch.setattr("alignment.rollout.vllm.rollout.Colocated", Started)
    server.config["model_config"]["enable_sleep_mode"] = True
    more = {**more, "vllm_mode": "colocate", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    trainer = make(None, server.folder, tmp_path, **more)
    trainer.train()
    assert server.sleeping and running == [True]
    trainer.close()
    assert running == [True, False]
    assert all(
        e[f"{p}{DIFFERENCE}"] < 1e-5 for e in trainer.state.log_history for p in ("", "eval_") if p + DIFFERENCE in e
    )
    assert {query for path, query in server.queries if path == "/sleep"} == {level}
    update = "/collective_rpc" if level == "level=2" else "/v1/load_lora_adapter"
    rollouts = "".join(server.paths(GENERATE, "/sleep", "/wake_up", update)).split("/sleep")
    kinds = [[bool(update in part), part.count("/wake_up"), part.count(GENERATE)] for part in rollouts]
    # The start, the initial policy's completions, and after each of two steps those of an evaluation.
    asked = [1, 2, 4, 2, 4, 2]
    sent = [False, *([True] * 5 if level == "level=2" else [True, False, True, False, True])]
    assert kinds[:-1] == [[s, int(n > 0), a] for n, (s, a) in enumerate(zip(sent, asked))]


@pytest.mark.parametrize("more", [{}, LORA])
def test_a_server_that_restarts_between_rollouts_gets_the_weights(
    server: FakeVLLM, tmp_path: Path, more: dict[str, Any]
) -> None:
    trainer = run(server, tmp_path, Acts("on_step_end", 2, server.restart), **more)
    assert trainer.state.log_history[2][DIFFERENCE] < 1e-5


def test_faults_that_pass_are_not_noticed(server: FakeVLLM, tmp_path: Path) -> None:
    server.fault = lambda path, number: Fault(503) if number % 3 == 1 else None
    trainer = run(server, tmp_path, max_steps=2)
    assert trainer.state.global_step == 2 and len(server.bodies()) > 1 + 2 * 4
