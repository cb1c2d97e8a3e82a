"""Common settings of all tests, the distribution of tests over workers, and two ways to run several ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
from support import continuing

from tools.ranks import RankServer
from tools.ranks.client import LAUNCHER_VARIABLES, environment
from tools.signals.command import launch_command

ROOT = Path(__file__).resolve().parent.parent
DRIVERS = ROOT / "tests" / "support" / "drivers"
Launch = Callable[..., "subprocess.CompletedProcess[str]"]
_PROCESSES = {"launch", "ranks"}


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of :mod:`continuing`."""
    continuing.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before any test module imports torch, DeepSpeed, transformers or datasets."""
    gc.disable()  # until all tests are collected: almost everything that imports create stays
    # Before torch is imported: for tiny models, more than one thread per operation is slower.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "DS_ACCELERATOR" not in os.environ and not _has_cuda():
        os.environ["DS_ACCELERATOR"] = "cpu"
    # Before triton is imported: its kernels then run on CPU tensors, one NumPy operation at a time.
    if not _has_cuda():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    cache = tempfile.TemporaryDirectory(prefix="alignment-tests-")
    config.add_cleanup(cache.cleanup)
    os.environ["HF_DATASETS_CACHE"] = cache.name
    continuing.register(config)
    # The same examples in every run; under load, an example may take as long as it needs.
    hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("fixed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Assign groups for pytest-xdist, longest first. A group runs in one worker.

    All tests that start processes form one group, so that only one of them uses the cores at a time. Other tests are
    grouped by file, because they share fixtures.
    """

    def group(item: pytest.Item) -> str:
        if item.path.parent.name == "vllm":  # one server for all
            return "vllm"
        return "processes" if _PROCESSES & set(getattr(item, "fixturenames", ())) else item.path.stem

    order = {"vllm": 0, "processes": 0, "docs": 1, "engine": 2, "launch": 3}
    items.sort(key=lambda item: min(order.get(name, 4) for name in (group(item), item.path.parent.name)))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))


def pytest_collection_finish() -> None:
    """Hide the libraries from the garbage collector, which DeepSpeed runs for every engine (0.3 s each)."""
    gc.collect()
    gc.freeze()
    gc.enable()


def run_launched(
    script: str | Path,
    *args: object,
    nproc: int = 1,
    launcher: str = "deepspeed",
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `script` with `args` on `nproc` ranks of this machine, and return its exit code, stdout and stderr.

    The repository is on PYTHONPATH. After `timeout` seconds the launcher and its processes are killed, and the test
    fails with their output.
    """
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    command = [*launch_command(script, nproc, launcher), *map(str, args)]
    process = subprocess.Popen(
        command,
        env=environment(PYTHONPATH=os.pathsep.join(filter(None, paths)), OMP_NUM_THREADS="1", **(env or {})),
        cwd=cwd,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(
            f"{' '.join(command)} did not end within {timeout} s\nstdout: {out[-2000:]}\nstderr: {err[-4000:]}"
        )
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def selected_cases(request: pytest.FixtureRequest, test: str) -> list[Any]:
    """Return the parameter ``case`` of all selected items of a test, which a fixture must compute."""
    own = [item for item in request.session.items if item.name.startswith(f"{test}[")]
    return [item.callspec.params["case"] for item in own if isinstance(item, pytest.Function)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The base models of runs with adapters."""
    from support.adapter_grid import make_bases

    return make_bases(tmp_path_factory.mktemp("bases"), layers=1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random model whose input and output embeddings are one weight."""
    from support.helpers import make_model

    return make_model(tmp_path_factory.mktemp("model") / "model", "tied", seed=1)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random model with an output embedding of its own."""
    from support.helpers import make_model

    return make_model(tmp_path_factory.mktemp("base") / "model", "untied")


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for initial adapters."""
    return tmp_path_factory.mktemp("starts")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that were loaded."""
    from transformers import AutoModelForCausalLM, PreTrainedModel

    calls: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        raise OSError("loading was recorded")

    for cls in (AutoModelForCausalLM, PreTrainedModel):
        monkeypatch.setattr(cls, "from_pretrained", record)
    return calls


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fake Hub for the processes of this test."""
    from support.fake_hub import FakeHub

    fake = FakeHub()
    for name, value in {"HF_ENDPOINT": fake.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"ENDPOINT": fake.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)  # read when the library is imported
    with fake.serving():
        yield fake


@pytest.fixture
def library_bars() -> Iterator[None]:
    """Restore the libraries' progress bars and warnings after commands that disable them."""
    from datasets import enable_progress_bars
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    yield
    transformers_logging.set_verbosity(verbosity)
    enable_progress_bars()
    transformers_logging.enable_progress_bar()


@pytest.fixture
def wandb() -> Iterator[Any]:
    """The module, which reads the environment once per process, as if it were newly imported."""
    module = pytest.importorskip("wandb")
    module.teardown()
    yield module
    module.teardown()


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Keep a command that runs in this process from leaving signals ignored, which later processes would inherit."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)}
    yield
    for each, handler in before.items():
        if signal.getsignal(each) == signal.SIG_IGN and handler is not None:
            signal.signal(each, handler)


@pytest.fixture(scope="session", autouse=True)
def complete_refusals() -> Iterator[None]:
    """Check the message of every user error raised in this process: a text, in which no reason is missing.

    Otherwise, ``refuse(options, "bf16 fp16", None)`` would pass every test that only looks for the keys.
    """
    from alignment.config.errors import AlignmentError

    def checked(self: AlignmentError, *message: Any) -> None:
        assert len(message) == 1 and isinstance(message[0], str), f"no message: {message!r}"
        assert not re.search(r"(^|: |; )(None)?(;|$)", message[0]), f"no reason: {message[0]!r}"
        super(AlignmentError, self).__init__(*message)

    with mock.patch.object(AlignmentError, "__init__", checked):
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_synced() -> Iterator[None]:
    """Leave out the waiting for the disk, about a tenth of the time of a short run; a power cut is not tested."""
    with mock.patch("os.fsync"):
        yield


@pytest.fixture(scope="session", autouse=True)
def curves_left_out() -> Iterator[None]:
    """Disable the drawing of curves, which takes 0.5 s per run; engine/test_run_report.py restores the function."""
    if "alignment.training.run_page" not in sys.modules:  # no test in this session trains
        yield
        return
    with mock.patch("alignment.training.run_page.draw_page"):
        yield


@pytest.fixture(scope="module")
def own_process_group() -> Iterator[None]:
    """Restore the process afterwards: no process group, and no variables of a one-rank world."""
    before = {name: os.environ.pop(name, None) for name in LAUNCHER_VARIABLES}
    yield
    import deepspeed

    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of one rank, in which fp16 is allowed."""
    from support.fragment_runs import fp16_on_cpu

    from alignment.engines.launch_env import init_distributed

    init_distributed(use_cpu=True)
    with fp16_on_cpu():
        yield


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of a launcher, and no GPU."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.fixture(scope="session")
def launch() -> Launch:
    """`launch(script, *args, nproc=1, launcher="deepspeed", timeout=120, env=None, cwd=None)`: see `run_launched`.

    For tests that depend on a launcher or on the start of a process. All other tests use `ranks`, which takes a third
    of the time.
    """
    return run_launched


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankServer]:
    """`ranks.run(script, *args, nproc=2, timeout=120)`: ranks forked from a process with imported libraries."""
    server = RankServer(ROOT)
    yield server
    server.close()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model for a real vLLM server; without the environment of one, the test is skipped."""
    from support.vllm_server import make_served, program

    if program() is None:
        pytest.skip("no environment of vLLM: run make vllm, or set VLLM_PYTHON")
    return make_served(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="session")
def running_server(served: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real vLLM server in fp32."""
    from support.vllm_server import RealServer

    with contextlib.closing(RealServer(served, tmp_path_factory.mktemp("server"))) as server:
        yield server


@pytest.fixture
def vllm_server(running_server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The real server with its original weights. A test leaves it running, with any weights."""
    monkeypatch.setenv("VLLM_API_KEY", running_server.key)
    yield running_server
    running_server.restore()
