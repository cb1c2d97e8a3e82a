"""The reason for the end of a job is described and reported, and the process exits, whatever hangs meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from support.fake_store import Ended, ended

from alignment.config.errors import ModelError, RewardError
from alignment.run import ending
from alignment.run.activity import Activity
from alignment.run.ending import Ending, causes, describe, end_with, lost_peer


@pytest.mark.parametrize("what", ["disk", "terminal", "temporary files", "processes", "an error"])
def test_what_hangs_is_not_waited_for(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang(*_: Any, **__: Any) -> None:
        time.sleep(20 if what != "an error" else 1 / 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ending.os, "_exit", ended)
    for name in ("_WRITE_S", "_REPORT_S", "_LATER_S"):
        monkeypatch.setattr(ending, name, 0.2)
    activity = SimpleNamespace(folder=tmp_path, status=SimpleNamespace(update=hang))
    monkeypatch.setattr(ending, "ACTIVITY", activity)
    monkeypatch.setattr(ending.shutil, "move", hang)
    monkeypatch.setattr(ending, "_LONGEST_S", 3.0)
    if what == "processes":
        monkeypatch.setattr(ending.psutil, "Process", hang)
    if what == "temporary files":
        monkeypatch.setattr(ending.tempfile, "NamedTemporaryFile", hang)
    if what == "terminal":
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=hang, flush=hang))
    begun = time.monotonic()
    with pytest.raises(Ended) as end:
        end_with(Ending("error: rank 1 hangs", 85, stacks=True), last=hang)
    assert time.monotonic() - begun < 5 and end.value.code == 85
    assert capsys.readouterr().err == ("" if what == "terminal" else "error: rank 1 hangs\n")


@pytest.mark.parametrize(("made", "state"), [
    (Ending("error: it failed"), "failed"), (Ending("", 0), "finished"), (Ending("hung", stacks=True), "failed"),
    (Ending("stopped", 85, "SIGTERM"), "preempted"),
])  # fmt: skip
def test_the_report_of_a_failure_follows_its_status(made: Ending, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stops or finishes has drawn it before; one that hangs or is killed has no time for it."""
    activity, happened = Activity(), list[str]()
    activity.status = SimpleNamespace(update=lambda **values: happened.append(values["state"]))  # type: ignore[assignment]
    activity.at_failure = lambda: happened.append("report")
    monkeypatch.setattr(ending, "ACTIVITY", activity)
    ending.record(made)
    assert happened == [state, *(["report"] if made.line == "error: it failed" else [])]


def test_a_process_ends_with_its_workers() -> None:
    code = """
import os, time
from alignment.run.ending import Ending, end_with
worker = os.fork()
if not worker:
    time.sleep(60)
print(worker, flush=True)
end_with(Ending("", 7))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert done.returncode == 7
    worker, end = int(done.stdout), time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


PAIR = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc"
CRASHING = "This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting"
REMOTE = (
    "remote process exited or there was a network error, NCCL version 2.21.5 ncclRemoteError: A call failed possibly "
    "due to a network error or a remote process exiting prematurely. Last error: Call to recv failed"
)
# Messages of torch 2.13, and what remains of them in the line for the user. Those of gloo and the store were observed
# ; those of NCCL are from reports.
LOST = [
    ("RuntimeError", f"{PAIR}:553] Connection closed by peer [127.0.0.1]:18317. {CRASHING} an error. GLHF!",
     "Connection closed by peer [127.0.0.1]:18317"),
    ("RuntimeError", f"Gloo connectFullMesh failed with {PAIR}:152] timed out connecting: SO_ERROR: No route to host",
     "Gloo connectFullMesh failed with timed out connecting: SO_ERROR: No route to host"),
    ("DistStoreError", "wait timeout after 6000ms, keys: /0//1", "wait timeout after 6000ms, keys: /0//1"),
    ("DistNetworkError", "Broken pipe", "Broken pipe"),
    ("DistBackendError", f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, {REMOTE}", REMOTE),
]  # fmt: skip


def raised(kind: str, text: str) -> RuntimeError:
    """An error of a library, by the name of its class."""
    found: type[RuntimeError] = RuntimeError if kind == "RuntimeError" else getattr(torch.distributed, kind)
    return found(text)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(("kind", "text", "reason"), LOST)
def test_a_lost_peer_is_one_line(kind: str, text: str, reason: str) -> None:
    """It is also seen behind the error of a model that could not be loaded."""
    error = raised(kind, text)
    line = f"another rank exited without reporting an error, or the network to it is down ({reason})"
    assert describe(error) == (line, False)
    assert lost_peer(error) is lost_peer(caused(ModelError("model 'm' could not be loaded"), error)) is error


def test_other_connections_are_not_ranks() -> None:
    for error in (
        RuntimeError("Data processing error: CAS service error: Connection reset by peer"),
        ConnectionResetError(104, "Connection reset by peer"),
        RewardError("judge: Connection closed by peer"),
        RuntimeError(f"{PAIR}:446] op.preamble.length <= op.preamble.nbytes. 8 vs 4"),
        raised("DistBackendError", "NCCL error in: /pytorch/NCCLUtils.hpp:268, invalid usage, NCCL version 2.21.5"),
    ):
        assert not lost_peer(error)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (type("UsageError", (Exception,), {"__module__": "wandb.errors"})("No API key configured."), "report_to"),
        (raised("DistBackendError", "NCCL error in: /pytorch/NCCLUtils.hpp:268, invalid usage"), "NCCL_DEBUG"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), "per_device_train_batch_size"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "more ranks"),
        (caused(TypeError("could not save"), RuntimeError("PytorchStreamWriter failed writing file data/0")), "full"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "dataloader_num_workers"),
        (OSError("Caught OSError in a worker.\nOriginal Traceback:\nOSError: [Errno 5] I/O"), "Errno 5"),
    ],
)  # fmt: skip
def test_errors_that_users_meet_are_one_line(error: Exception, says: str) -> None:
    line, is_bug = describe(error)
    assert says in line and "Traceback" not in line and not is_bug


def test_cyclic_causes_are_visited_once() -> None:
    first, second = RuntimeError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    assert causes(first) == [first, second]
    assert describe(first)[1], "and searched for a full disk"
