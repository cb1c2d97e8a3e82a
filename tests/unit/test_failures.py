"""Descriptions of errors: their line, and whether they are bugs."""

from __future__ import annotations

import itertools

import pytest

from alignment.config.errors import ModelError, RewardError
from alignment.run.failures import JoinError, ReportedElsewhere, causes, describe, is_lost_peer

PAIR = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc"
CRASHING = "This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting"
REMOTE = (
    "remote process exited or there was a network error, NCCL version 2.21.5 ncclRemoteError: A call failed possibly "
    "due to a network error or a remote process exiting prematurely. Last error: Call to recv failed"
)
# Messages of torch 2.13, and what remains of them in the line for the user. Those of gloo and the store were observed
# (test_lost_peers.py produces most of them); those of NCCL are from reports.
LOST = [
    ("RuntimeError", f"{PAIR}:553] Connection closed by peer [127.0.0.1]:18317. {CRASHING} an error. GLHF!",
     "Connection closed by peer [127.0.0.1]:18317"),
    ("RuntimeError", f"{PAIR.replace('pair', 'unbound_buffer')}:78] Timed out waiting 6000ms for recv operation",
     "Timed out waiting 6000ms for recv operation"),
    ("RuntimeError", f"Gloo connectFullMesh failed with {PAIR}:152] timed out connecting: SO_ERROR: No route to host",
     "Gloo connectFullMesh failed with timed out connecting: SO_ERROR: No route to host"),
    ("DistStoreError", "wait timeout after 6000ms, keys: /0//1", "wait timeout after 6000ms, keys: /0//1"),
    ("DistNetworkError", "Broken pipe", "Broken pipe"),
    ("DistBackendError", f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, {REMOTE}", REMOTE),
]  # fmt: skip


def raised(kind: str, text: str) -> RuntimeError:
    """An error of a library, by the name of its class."""
    import torch

    found: type[RuntimeError] = RuntimeError if kind == "RuntimeError" else getattr(torch.distributed, kind)
    return found(text)


@pytest.mark.parametrize(("kind", "text", "reason"), LOST)
def test_a_lost_peer_is_one_line(kind: str, text: str, reason: str) -> None:
    error = raised(kind, text)
    line = f"another rank exited without reporting an error, or the network to it is down ({reason})"
    assert describe(error) == (line, False)
    assert is_lost_peer(error)
    # A rank was lost while another one was loading a model, which reported it as a fault of the model.
    try:
        try:
            raise error
        except RuntimeError as inner:
            raise ModelError(f"model 'm' could not be loaded: {inner}") from inner
    except ModelError as outer:
        assert describe(outer) == (line, False)
        assert is_lost_peer(outer)


def test_other_connections_are_not_ranks() -> None:
    for error in (
        RuntimeError("Data processing error: CAS service error: Connection reset by peer"),
        ConnectionResetError(104, "Connection reset by peer"),
        RewardError("judge: Connection closed by peer"),
        RuntimeError("tensor shapes differ"),
        RuntimeError(f"{PAIR}:446] op.preamble.length <= op.preamble.nbytes. 8 vs 4"),
        raised("DistBackendError", "NCCL error in: /pytorch/NCCLUtils.hpp:268, invalid usage, NCCL version 2.21.5"),
    ):
        assert not is_lost_peer(error)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (type("UsageError", (Exception,), {"__module__": "wandb.errors"})("No API key configured."), "report_to"),
        (raised("DistBackendError", "NCCL error in: /pytorch/NCCLUtils.hpp:268, invalid usage"), "NCCL_DEBUG"),
    ],
)
def test_errors_of_libraries_are_one_line(error: Exception, says: str) -> None:
    line, is_bug = describe(error)
    assert says in line and not is_bug


def test_an_error_in_joining_keeps_its_message() -> None:
    try:
        try:
            raise raised("DistNetworkError", "Broken pipe")
        except RuntimeError as inner:
            raise JoinError("port 1 is in use") from inner
    except JoinError as error:
        assert describe(error) == ("port 1 is in use", False)
        assert not is_lost_peer(error)
    assert describe(ReportedElsewhere("rank 1: port 1 is in use")) == ("", False)


def test_a_full_disk_is_found_behind_other_errors() -> None:
    try:
        try:
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
        except RuntimeError as inner:
            raise TypeError("could not save") from inner
    except TypeError as error:
        line, is_bug = describe(error)
    assert line.startswith("a file could not be written because the disk is full") and not is_bug


def test_memory_errors_name_what_to_do() -> None:
    import torch

    for error, what in (
        (
            torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            "per_device_train_batch_size",
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "more ranks"),
    ):
        line, is_bug = describe(error)
        assert what in line and not is_bug


def test_cyclic_causes_are_visited_once() -> None:
    first, second = RuntimeError("first"), ValueError("second")
    first.__cause__, second.__context__ = second, first
    assert list(itertools.islice(causes(first), 5)) == [first, second]
    assert describe(first)[1], "and searched for a full disk"
