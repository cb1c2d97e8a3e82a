"""A colocated server: its command and environment, its start, and that none of its processes outlives the run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from support.fake_vllm_program import write_program
from support.helpers import tiny_config

from alignment.config.errors import OptionError, TrainingError
from alignment.methods.online_dpo_options import OnlineDPOConfig
from alignment.models.source import ModelSource
from alignment.rollout.vllm import colocated as module
from alignment.rollout.vllm.client import Client
from alignment.rollout.vllm.colocated import Colocated
from alignment.run.ending import Ending, end_with

pytestmark = pytest.mark.usefixtures("one_process")
UNWANTED = {
    **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"},
    **{"TORCHELASTIC_RUN_ID": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTHONPATH": "/elsewhere"},
}


def colocated(program: Path, **options: Any) -> Colocated:
    """A server of the program for a small model, with its log beside the program."""
    given = {"use_vllm": True, "vllm_mode": "colocate", "vllm_executable": program, "use_cpu": True, **options}
    source = ModelSource("a-model", None, tiny_config("tied"), {})
    return Colocated(OnlineDPOConfig("out", **given), source, None, "float32", program.parent)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """A function that returns a server and the file with the facts about it, of a program with a fault."""
    facts = tmp_path / "facts.json"

    def make(fault: str = "", **options: Any) -> tuple[Colocated, Path]:
        program, _ = write_program(tmp_path, monkeypatch, fault)
        return colocated(program, **options), facts

    yield make
    if facts.exists():
        for pid in json.loads(facts.read_text())["pids"]:  # of a failed test
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def gone(facts: Path, seconds: float = 5.0) -> bool:
    """Whether the supervisor, the server and its child end within this time."""
    pids = json.loads(facts.read_text())["pids"]
    assert len(pids) == 3
    return wait_for(lambda: not any(map(alive, pids)), seconds)


def test_start_and_stop(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in UNWANTED.items():
        monkeypatch.setenv(name, value)
    one, facts = server()
    url = one.start()
    found = json.loads(facts.read_text())
    words, environment = found["arguments"], found["environment"]
    assert words[:2] == ["serve", "a-model"] and url == f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    assert words[words.index("--host") + 1] == "127.0.0.1" and words[words.index("--max-model-len") + 1] == "512"
    assert environment["VLLM_API_KEY"] == one.key and len(one.key) > 30 and one.key not in " ".join(words)
    assert environment["VLLM_SERVER_DEV_MODE"] == environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert environment.keys() & UNWANTED.keys() == set()
    assert one.key not in one.log.read_text() and "loading" in one.log.read_text()
    one.check()
    one.stop()
    one.stop()
    assert gone(facts, 0.0)
    with pytest.raises(ConnectionRefusedError):
        HTTPConnection("127.0.0.1", int(url.rsplit(":", 1)[1])).request("GET", "/health")


def test_visible_device_of_the_rank(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from alignment.rollout.vllm.command import colocated_environment

    one, _ = server()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert colocated_environment(one.options, "", 1)["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    assert colocated_environment(one.options, "", 1)["CUDA_VISIBLE_DEVICES"] == "GPU-b"


@pytest.mark.parametrize(
    ("fault", "options", "says"),
    [
        ("fails", {}, "exited with status 3: ValueError: no such model (log: "),
        ("hangs", {"vllm_server_timeout": 0.8}, "vllm_server_timeout=0.8): INFO loading (log: "),
    ],
)
def test_failed_start(server: Any, fault: str, options: dict[str, Any], says: str) -> None:
    one, facts = server(fault, **options)
    with pytest.raises(TrainingError) as caught:
        one.start()
    assert says in str(caught.value) and str(one.log) in str(caught.value)
    assert gone(facts)


def test_missing_program(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="^vllm_executable="):
        colocated(tmp_path / "none")


def test_server_that_dies(server: Any) -> None:
    """Its other processes end as well, and the run is told."""
    one, facts = server()
    one.start()
    os.kill(json.loads(facts.read_text())["pids"][1], signal.SIGKILL)
    assert gone(facts)
    with pytest.raises(TrainingError, match="exited with status 137: it has written nothing"):
        one.check()
    one.stop()


def test_requests_end_with_the_server(server: Any) -> None:
    """They are not repeated until the time limit."""
    one, facts = server()
    with contextlib.closing(Client(one.start(), 60.0, one.key, one.check)) as client:
        os.kill(json.loads(facts.read_text())["pids"][1], signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(TrainingError, match="exited with status 137"):
            client.state()
        assert time.monotonic() - begun < 20.0
    one.stop()


def test_supervisor_that_dies(server: Any) -> None:
    one, facts = server()
    one.start()
    supervisor, main, child = json.loads(facts.read_text())["pids"]
    os.kill(supervisor, signal.SIGKILL)
    assert wait_for(lambda: not alive(main))
    one.stop()
    assert gone(facts)


def test_thread_that_started_it_ends(server: Any) -> None:
    one, facts = server()
    thread = threading.Thread(target=one.start)
    thread.start()
    thread.join()
    time.sleep(1.0)
    one.check()
    one.stop()
    assert gone(facts)


def leave_by_end_with() -> NoReturn:
    end_with(Ending("", 1))


ENDS: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(0),
    "end_with": leave_by_end_with,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGKILL to its group": lambda: os.killpg(0, signal.SIGKILL),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("starting", [False, True], ids=["ready", "starting"])
def test_no_process_outlives_the_run(server: Any, end: str, starting: bool) -> None:
    one, facts = server("hangs" if starting else "")
    run = os.fork()
    if run == 0:
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if starting:
                threading.Thread(target=lambda: (wait_for(facts.exists), ENDS[end]())).start()
            one.start()
            ENDS[end]()
        finally:
            os._exit(99)
    status = os.waitpid(run, 0)[1]
    assert os.waitstatus_to_exitcode(status) != 99
    assert gone(facts)


def test_server_that_ignores_signals(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.5)
    one, facts = server("deaf")
    one.start()
    one.stop()
    assert gone(facts, 0.5)
