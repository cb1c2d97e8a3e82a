"""Settings every test runs under, and `launch`, which runs a script on several ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What a launcher, or an earlier in-process run, leaves in the environment; a launched script must not inherit it.
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "ALIGNMENT_SINGLE_PROCESS"),
)

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module imports torch, DeepSpeed, transformers or datasets."""
    # Before torch is imported: on tiny models a second thread per operation costs more than it brings.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "DS_ACCELERATOR" not in os.environ and not _has_cuda():
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    cache = tempfile.TemporaryDirectory(prefix="alignment-tests-")
    config.add_cleanup(cache.cleanup)
    os.environ["HF_DATASETS_CACHE"] = cache.name


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch_command(script: str | Path, nproc: int, launcher: str) -> list[str]:
    """The command before the script's own arguments: `launcher` is `deepspeed`, `torchrun` or `python`."""
    if launcher == "deepspeed":
        options = ["--num_gpus", str(nproc), "--master_port", str(free_port())]
        return [sys.executable, "-m", "deepspeed.launcher.runner", *options, str(script)]
    if launcher == "torchrun":
        options = ["--nproc_per_node", str(nproc), "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
        return [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    if launcher != "python" or nproc != 1:
        raise ValueError(f"launcher={launcher!r}, nproc={nproc}: expected deepspeed, torchrun, or python with nproc=1")
    return [sys.executable, str(script)]


def run_launched(
    script: str | Path,
    *args: object,
    nproc: int = 1,
    launcher: str = "deepspeed",
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `script` with `args` on `nproc` ranks of this machine and return its exit code, stdout and stderr.

    The repository is on PYTHONPATH. After `timeout` seconds the launcher and its processes are killed and the test
    fails with what was printed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment.update(PYTHONPATH=os.pathsep.join(filter(None, paths)), OMP_NUM_THREADS="1", **(env or {}))
    command = [*launch_command(script, nproc, launcher), *map(str, args)]
    process = subprocess.Popen(
        command,
        env=environment,
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


@pytest.fixture(scope="session")
def launch() -> Launch:
    """`launch(script, *args, nproc=1, launcher="deepspeed", timeout=120, env=None, cwd=None)`: see `run_launched`."""
    return run_launched
