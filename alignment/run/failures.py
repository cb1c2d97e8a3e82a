"""Description of an error: one line for the user, whether it is a bug, and the exit status.

Nothing here writes or exits; the guard does.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

from alignment.config.errors import AlignmentError

# Gloo's messages about a connection that broke, could not be made, or timed out. Other libraries use the same words
# for their own connections, so the message must also contain a path of gloo's sources.
_GLOO = ("/gloo/transport/", "Gloo connectFullMesh failed")
_BROKEN = (
    *("Connection closed", "Connection reset", "Connection refused", "Connection timed out", "Broken pipe"),
    *("No route to host", "Network is unreachable", "Host is unreachable", "timed out connecting", "Connect timeout"),
    *("Read timeout", "Write timeout", "Read error", "Socket closed", "Socket unexpectedly closed"),
    *("Timed out waiting", "Application timeout caused pair closure", "Gloo connectFullMesh failed"),
)
# torch.distributed's own classes: store errors count whatever their message, NCCL errors depending on it.
_STORE = ("torch.DistStoreError", "torch.DistNetworkError")
_NCCL = "torch.DistBackendError"
_NCCL_BROKEN = (
    *("ncclRemoteError", "remote process exited", "ncclSystemError", "communicator was aborted"),
    *("collective operation timeout", "Connection closed", "Connection reset", "Connection refused", "Broken pipe"),
    *("wait timeout after", "Socket Timeout"),
)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK_FULL_TEXTS = ("No space left on device", "PytorchStreamWriter failed", "Disk quota exceeded")
_PATH_NAMES = ("filename", "checkpoint_file", "path", "file", "f", "save_directory", "output_dir")


class JoinError(AlignmentError):
    """This rank could not join the others. The message gives the reason, whatever error caused it."""


class ReportedElsewhere(JoinError):
    """Another rank could not join and reports it; this rank exits without a message."""


def describe(error: BaseException) -> tuple[str, bool]:
    """Return one line for the user, and whether the error is a bug whose traceback is worth showing.

    The line is empty for a `SystemExit` with a number, whose message has already been written.
    """
    kinds = _kinds(error)
    text = str(error)
    if "Original Traceback" in text:  # torch's message of an error in a data loader worker; the last line is the error
        text = text.strip().splitlines()[-1]
    text = " ".join(text.split())
    lost = _lost_peer_in(error)
    if lost is not None:
        return (
            f"another rank exited without reporting an error, or the network to it is down ({reason_of(lost)})",
            False,
        )
    if isinstance(error, ReportedElsewhere):
        return "", False
    if isinstance(error, AlignmentError):
        return text, False
    if isinstance(error, SystemExit):
        return (text if isinstance(error.code, str) else ""), False
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by the user", False
    if "torch.OutOfMemoryError" in kinds:
        advice = "use a smaller per_device_train_batch_size or max_length, set gradient_checkpointing to true, or pass"
        return f"the GPU is out of memory: {advice} a DeepSpeed file that offloads ({_shorten(text)})", False
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return f"the host is out of memory: offload less, use a smaller model or more ranks ({_shorten(text)})", False
    if any(kind.startswith("wandb.") for kind in kinds):
        advice = "run `wandb login`, set WANDB_MODE=offline in the environment, or set report_to to none"
        return f"report_to: wandb failed ({_shorten(text)}); {advice}", False
    if _NCCL in kinds:
        return f"NCCL failed ({reason_of(error)}); set NCCL_DEBUG=INFO in the environment for details", False
    if text.startswith("DataLoader worker"):  # killed by a signal, or exited unexpectedly
        return f"{_shorten(text)}; the host may have run out of memory: set dataloader_num_workers to 0", False
    full = _disk_full_in(error)
    if full is not None:
        advice = "free some space, or set output_dir to a folder on another disk"
        return f"{_path_of(full) or 'a file'} could not be written because the disk is full; {advice}", False
    if isinstance(error, OSError):
        return _os_error(error, text), False
    if any(kind.endswith(".SafetensorError") for kind in kinds):
        return f"{_path_of(error) or 'a safetensors file'} cannot be read or written: {text}", False
    return f"{type(error).__name__}: {_shorten(text)} (this is a bug; please report it with the traceback)", True


def is_lost_peer(error: BaseException) -> bool:
    """Whether a call failed because another rank, or the network connection to it, was lost.

    The causes are inspected because code in between, such as model loading, may have wrapped the error.
    """
    return _lost_peer_in(error) is not None


def reason_of(error: BaseException) -> str:
    """A library's message about a lost peer, without source locations and advice."""
    text = " ".join(str(error).split())
    for noise in (r"\[\S+gloo/transport/\S+\] ", r"\[enforce fail at \S+\] ", r"NCCL error in: \S+, "):
        text = re.sub(noise, "", text)
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
        if any(kind in kinds for kind in _STORE):
            return each
        if _NCCL in kinds and any(sign in text for sign in _NCCL_BROKEN):
            return each
        if isinstance(each, RuntimeError) and any(sign in text for sign in _GLOO):
            if any(sign in text for sign in _BROKEN):
                return each
    return None


def _kinds(error: BaseException) -> set[str]:
    """The classes of an error, each prefixed with its top-level package."""
    return {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}


def _disk_full_in(error: BaseException) -> BaseException | None:
    """The error of a full disk among the causes of an error, if any. Libraries wrap it in their own errors."""
    for each in causes(error):
        if isinstance(each, OSError) and each.errno in _DISK_FULL:
            return each
        if any(sign in str(each) for sign in _DISK_FULL_TEXTS):
            return each
    return None


def _os_error(error: OSError, text: str) -> str:
    if error.strerror is None:
        return text or type(error).__name__
    path = _path_of(error)
    return f"{path}: {error.strerror}" if path else error.strerror


def _path_of(error: BaseException) -> str:
    """The path of a failed read or write: the error's own, or that of a variable in the innermost matching frame."""
    own = getattr(error, "filename", None)
    if own is not None:
        return str(own)
    if isinstance(error, OSError) and error.errno not in (*_DISK_FULL, errno.EIO):
        return ""  # such as a socket error
    found = ""
    trace = error.__traceback__
    while trace is not None:
        variables = trace.tb_frame.f_locals
        paths = [variables[name] for name in _PATH_NAMES if isinstance(variables.get(name), (str, os.PathLike))]
        found = str(paths[0]) if paths else found
        trace = trace.tb_next
    return found


def _shorten(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
