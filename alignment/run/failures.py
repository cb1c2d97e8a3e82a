"""Description of an error: one line for the user, and whether it is a bug."""

from __future__ import annotations

import re
from collections.abc import Iterator

from alignment.config.errors import AlignmentError

# Errors of connections between ranks, by gloo and NCCL; op.preamble: the ranks disagree about the size of a tensor.
_LOST = re.compile(
    r"gloo/transport/(?!.*op\.preamble)|Gloo connectFullMesh|"
    r"NCCL.*(remote process|ncclRemoteError|ncclSystemError)|NCCL communicator was aborted",
    re.DOTALL,
)
_STORE = ("DistStoreError", "DistNetworkError")
_NOISE = re.compile(r"\[[^\]]*\.(cc|h):\d+\] |NCCL error in: \S+, |\. This is typically.*|Exception raised from.*")
_DISK_FULL = re.compile("No space left on device|Disk quota exceeded|PytorchStreamWriter failed")
_LONGEST = 300
_GPU_MEMORY = (
    "the GPU is out of memory: use a smaller per_device_train_batch_size or max_length, set gradient_checkpointing to "
    "true, or pass a DeepSpeed file that offloads"
)
_HOST_MEMORY = "the host is out of memory: offload less, use a smaller model or more ranks"
_WANDB = "run `wandb login`, set WANDB_MODE=offline in the environment, or set report_to to none"
_FREE = "could not be written because the disk is full; free some space, or set output_dir to a folder on another disk"


class JoinError(AlignmentError):
    """This rank could not join the others, for the given reason."""


class ReportedElsewhere(JoinError):
    """Another rank could not join and reports it; this rank exits without a message."""


class OtherRankFailed(AlignmentError):
    """The first rank has failed, and reports why."""


def describe(error: BaseException) -> tuple[str, bool]:
    """Return one line for the user, and whether the error is a bug whose traceback is worth showing.

    The line is empty for a `SystemExit` with a number, whose message has already been written.
    """
    text = str(error)
    if "Original Traceback" in text:  # torch's message of an error in a data loader worker; the last line is the error
        text = text.strip().splitlines()[-1]
    text = " ".join(text.split())
    line = _described(error, text)
    bug = f"{type(error).__name__}: {_shorten(text)} (this is a bug; please report it with the traceback)"
    return (bug, True) if line is None else (line, False)


def _described(error: BaseException, text: str) -> str | None:
    """The line of an error that is not a bug."""
    kind, lost = type(error), _lost_peer_in(error)
    if lost is not None:
        return f"another rank exited without reporting an error, or the network to it is down ({reason_of(lost)})"
    if isinstance(error, AlignmentError):
        return "" if isinstance(error, ReportedElsewhere) else text
    if isinstance(error, SystemExit):
        return text if isinstance(error.code, str) else ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by the user"
    if kind.__name__ == "OutOfMemoryError":
        return f"{_GPU_MEMORY} ({_shorten(text)})"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return f"{_HOST_MEMORY} ({_shorten(text)})"
    if kind.__module__.startswith("wandb."):
        return f"report_to: wandb failed ({_shorten(text)}); {_WANDB}"
    if kind.__name__ == "DistBackendError":
        return f"NCCL failed ({reason_of(error)}); set NCCL_DEBUG=INFO in the environment for details"
    if text.startswith("DataLoader worker"):  # killed by a signal, or exited unexpectedly
        return f"{_shorten(text)}; the host may have run out of memory: set dataloader_num_workers to 0"
    full = next((each for each in causes(error) if _DISK_FULL.search(str(each))), None)
    if full is not None:
        return f"{getattr(full, 'filename', None) or 'a file'} {_FREE}"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or text
    return None


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error or a cause of it is that another rank has failed, or the network connection to it."""
    return isinstance(error, OtherRankFailed) or _lost_peer_in(error) is not None


def reason_of(error: BaseException) -> str:
    """A library's message about a lost peer, without source locations and advice."""
    return _shorten(_NOISE.sub("", " ".join(str(error).split())).strip())


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, each once, including those hidden by ``raise … from None``."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _lost_peer_in(error: BaseException) -> BaseException | None:
    """The error of a lost peer among the causes of an error, if any."""
    for each in causes(error):
        if isinstance(each, JoinError):
            return None
        if type(each).__name__ in _STORE or (isinstance(each, RuntimeError) and _LOST.search(str(each))):
            return each
    return None


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
