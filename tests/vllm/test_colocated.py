"""A colocated server of vLLM itself: what it exposes, and that none of its processes outlives the run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import ROOT
from support.helpers import exit_status
from transformers import LlamaConfig, LlamaForCausalLM

from alignment.cli import vllm_serve
from alignment.config.errors import TrainingError
from alignment.methods.online_dpo_options import OnlineDPOConfig
from alignment.models.source import ModelSource
from alignment.rollout.vllm.client import Client
from alignment.rollout.vllm.colocated import Colocated

EXECUTABLE = Path(os.environ.get("VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python").with_name("vllm")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("one_process"),
    pytest.mark.skipif(not EXECUTABLE.exists(), reason="vLLM is not installed; run make vllm"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with heads of 32 dimensions, the least that vLLM's attention on a CPU supports."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
    config = LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Colocated:
    options = OnlineDPOConfig(
        "out",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_executable=EXECUTABLE,
        vllm_server_timeout=420,
        max_length=128,
        use_cpu=True,
    )
    source = ModelSource(str(model), None, LlamaConfig.from_pretrained(model), {})
    return Colocated(options, source, None, "float32", tmp_path)


def processes(supervisor: int) -> list[psutil.Process]:
    """The processes in the session of a supervisor that are not zombies."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == supervisor and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def wait_for(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(condition())


def named(supervisor: int, name: str) -> int:
    """The ID of the process with this part in its title; 0 if there is none."""
    return next((each.pid for each in processes(supervisor) if name in " ".join(each.cmdline())), 0)


def status(url: str, path: str, **headers: str) -> int:
    host, _, port = url.removeprefix("http://").partition(":")
    connection = HTTPConnection(host, int(port), timeout=30)
    connection.request("GET", path, headers=headers)
    return connection.getresponse().status


def test_what_the_server_exposes(server: Colocated) -> None:
    url = server.start()
    assert server._process is not None
    supervisor = server._process.pid
    found = processes(supervisor)
    addresses = {each.laddr.ip for one in found for each in one.net_connections("inet") if each.status == "LISTEN"}
    assert len(found) >= 3 and addresses == {"127.0.0.1"}
    assert status(url, "/v1/models") == 401
    assert status(url, "/v1/models", Authorization=f"Bearer {server.key}") == 200
    assert status(url, "/weight_info") == 200  # a development endpoint, which no key protects
    assert server.key not in server.log.read_text() and "SECURITY WARNING" in server.log.read_text()
    assert not any(server.key in " ".join(one.cmdline()) for one in found)
    server.stop()
    assert processes(supervisor) == []


@pytest.mark.usefixtures("own_process_group")
def test_the_printed_command_starts_a_server(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As a shell runs it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = ["--use_vllm", "--vllm_executable", EXECUTABLE, "--vllm_server_port", port, "--use_peft", "--use_cpu"]
    given += ["--model_name_or_path", model, "--max_length", 96, "--max_new_tokens", 32, "--reward_funcs", "x.py:f"]
    capfd.readouterr()
    assert exit_status(vllm_serve.main, ["online_dpo", *map(str, given)]) == 0
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(["sh", "-c", f"exec env {capfd.readouterr().out}"], stdout=log, stderr=log)
    try:
        with contextlib.closing(Client(f"http://127.0.0.1:{port}", 420.0)) as client:
            info = client.info()
            sampling = {"n": 2, "seed": 1, "max_tokens": 4, "ignore_eos": True, "logprobs": 0, "detokenize": False}
            body = {"token_ids": [5, 6], "model": info.model, "sampling_params": sampling}
            (choices,) = client.generate([body])
        assert (info.root, info.max_length, [len(each.ids) for each in choices]) == (str(model), 96, [4, 4])
        assert info.config["lora_config"]["max_lora_rank"] == 16
    finally:
        server.terminate()
        server.wait()


@pytest.mark.parametrize("starting", [True, False], ids=["starting", "ready"])
@pytest.mark.parametrize("victim", ["supervise.py", "serve", "EngineCore"])
def test_no_process_outlives_another(server: Colocated, victim: str, starting: bool) -> None:
    failed: list[BaseException] = []

    def start() -> None:
        try:
            server.start()
        except TrainingError as error:
            failed.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    assert wait_for(lambda: server._process, 30.0) and server._process is not None
    supervisor = server._process.pid
    if starting:
        assert wait_for(lambda: named(supervisor, "EngineCore"), 300.0)
    else:
        thread.join()
    os.kill(named(supervisor, victim), signal.SIGKILL)
    if starting:
        thread.join()
        assert len(failed) == 1 and "exited" in str(failed[0])
    else:
        assert wait_for(lambda: server._process is not None and server._process.poll() is not None, 40.0)
        server.stop()
    assert wait_for(lambda: not processes(supervisor), 20.0)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("starting", [True, False], ids=["starting", "ready"])
def test_no_process_outlives_the_run(server: Colocated, end: signal.Signals, starting: bool, tmp_path: Path) -> None:
    run = os.fork()
    if run == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            server.start()
            (tmp_path / "ready").touch()
            time.sleep(1000)
        finally:
            os._exit(99)
    try:
        assert wait_for(lambda: psutil.Process(run).children(), 30.0)
        supervisor = psutil.Process(run).children()[0].pid
        assert wait_for(
            lambda: named(supervisor, "EngineCore") if starting else (tmp_path / "ready").exists(), 420.0
        ), server.log.read_text()
    finally:
        os.kill(run, end)
        os.waitpid(run, 0)
    assert wait_for(lambda: not processes(supervisor), 20.0)
