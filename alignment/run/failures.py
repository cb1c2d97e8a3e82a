"""Description of an error: one line for the user, whether it is a bug, and the exit status.

Nothing here writes or exits.
"""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Iterator

from alignment.config.errors import AlignmentError

# Errors of a connection that broke, could not be made, or timed out. Other libraries use the same words for their own
# connections, so the error must also come from the store, from NCCL or from gloo.
_BROKEN = re.compile(
    r"connection (closed|reset|refused|timed out)|connect timeout|connecting|connectFullMesh|broken pipe|no route|"
    r"unreachable|(read|write) (timeout|error)|socket (closed|timeout|unexpectedly)|timed out waiting|pair closure|"
    r"remote ?process|ncclRemoteError|ncclSystemError|communicator was aborted|operation timeout|wait timeout after",
    re.IGNORECASE,
)
_GLOO = re.compile("gloo/transport/|Gloo connectFullMesh")
_STORE, _NCCL = {"torch.DistStoreError", "torch.DistNetworkError"}, "torch.DistBackendError"
_NOISE = re.compile(r"\[\S+gloo/transport/\S+\] |\[enforce fail at \S+\] |NCCL error in: \S+, ")
_DISK_FULL = re.compile("No space left on device|PytorchStreamWriter failed|Disk quota exceeded")
_PATH_NAMES = ("filename", "checkpoint_file", "path", "file", "f", "save_directory", "output_dir")
_GPU_MEMORY = (
    "the GPU is out of memory: use a smaller per_device_train_batch_size or max_length, set gradient_checkpointing to "
    "true, or pass a DeepSpeed file that offloads"
)
_HOST_MEMORY = "the host is out of memory: offload less, use a smaller model or more ranks"
_WANDB = "run `wandb login`, set WANDB_MODE=offline in the environment, or set report_to to none"
_FREE = "could not be written because the disk is full; free some space, or set output_dir to a folder on another disk"


class JoinError(AlignmentError):
    """This rank could not join the others. The message gives the reason, whatever error caused it."""


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
    line = _described(error, _kinds(error), text)
    if line is None:
        return f"{type(error).__name__}: {_shorten(text)} (this is a bug; please report it with the traceback)", True
    return line, False


def _described(error: BaseException, kinds: set[str], text: str) -> str | None:
    """The line of an error that is not a bug."""
    lost = _lost_peer_in(error)
    if lost is not None:
        return f"another rank exited without reporting an error, or the network to it is down ({reason_of(lost)})"
    if isinstance(error, AlignmentError):
        return "" if isinstance(error, ReportedElsewhere) else text
    if isinstance(error, SystemExit):
        return text if isinstance(error.code, str) else ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by the user"
    if "torch.OutOfMemoryError" in kinds:
        return f"{_GPU_MEMORY} ({_shorten(text)})"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return f"{_HOST_MEMORY} ({_shorten(text)})"
    if any(kind.startswith("wandb.") for kind in kinds):
        return f"report_to: wandb failed ({_shorten(text)}); {_WANDB}"
    if _NCCL in kinds:
        return f"NCCL failed ({reason_of(error)}); set NCCL_DEBUG=INFO in the environment for details"
    if text.startswith("DataLoader worker"):  # killed by a signal, or exited unexpectedly
        return f"{_shorten(text)}; the host may have run out of memory: set dataloader_num_workers to 0"
    full = next((each for each in causes(error) if _is_disk_full(each)), None)
    if full is not None:
        return f"{_path_of(full) or 'a file'} {_FREE}"
    if isinstance(error, OSError):
        path = _path_of(error) if error.filename is not None or error.errno == errno.EIO else ""
        return f"{path}: {error.strerror}" if path else error.strerror or text or type(error).__name__
    if any(kind.endswith(".SafetensorError") for kind in kinds):
        return f"{_path_of(error) or 'a safetensors file'} cannot be read or written: {text}"
    return None


def is_lost_peer(error: BaseException) -> bool:
    """Whether a call failed because another rank has failed, or because the network connection to it was lost.

    The causes are inspected because code in between, such as model loading, may have wrapped the error.
    """
    return isinstance(error, OtherRankFailed) or _lost_peer_in(error) is not None


def reason_of(error: BaseException) -> str:
    """A library's message about a lost peer, without source locations and advice."""
    text = _NOISE.sub("", " ".join(str(error).split()))
    return _shorten(re.split(r"\. This is typically|Exception raised from", text)[0].strip())


def exit_code(error: BaseException) -> int:
    """The exit status of a command that ends with this error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


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
        kinds, text = _kinds(each), str(each)
        of_ranks = _NCCL in kinds or (isinstance(each, RuntimeError) and _GLOO.search(text))
        if kinds & _STORE or (of_ranks and _BROKEN.search(text)):
            return each
    return None


def _kinds(error: BaseException) -> set[str]:
    """The classes of an error, each prefixed with its top-level package."""
    return {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}


def _is_disk_full(error: BaseException) -> bool:
    """Whether this is the error of a full disk. Libraries wrap it in their own errors."""
    number = error.errno if isinstance(error, OSError) else None
    return number in (errno.ENOSPC, errno.EDQUOT) or _DISK_FULL.search(str(error)) is not None


def _path_of(error: BaseException) -> str:
    """The path of a failed read or write: the error's own, or that of a variable in the innermost matching frame."""
    found = getattr(error, "filename", None) or ""
    for frame, _ in traceback.walk_tb(None if found else error.__traceback__):
        paths = [each for name in _PATH_NAMES if isinstance(each := frame.f_locals.get(name), (str, os.PathLike))]
        found = paths[0] if paths else found
    return str(found)


def _shorten(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
