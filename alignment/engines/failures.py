"""What an error is called: one line for the user, whether it is a defect, and the exit status.

Nothing here writes or ends anything; the guard does.
"""

from __future__ import annotations

import errno
import os
import re

from alignment.config.errors import AlignmentError

_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError", "remote process exited")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK_FULL_TEXTS = ("No space left on device", "PytorchStreamWriter failed", "Disk quota exceeded")
_PATH_NAMES = ("filename", "checkpoint_file", "path", "file", "f", "save_directory", "output_dir")


def describe(error: BaseException) -> tuple[str, bool]:
    """One line for the user, and whether the error is a defect whose traceback is worth showing.

    The line is empty for a `SystemExit` with a number: whoever raised it has already spoken.
    """
    kinds = {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    text = " ".join(str(error).split())
    if isinstance(error, AlignmentError):
        return text, False
    if isinstance(error, SystemExit):
        return (text if isinstance(error.code, str) else ""), False
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by the user", False
    if "torch.OutOfMemoryError" in kinds:
        advice = (
            "a smaller per_device_train_batch_size or max_length, gradient_checkpointing true, or a deepspeed file"
        )
        return f"the GPU is out of memory: set {advice} that offloads ({_shorten(text)})", False
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return f"the host is out of memory: use less offload, a smaller model or more ranks ({_shorten(text)})", False
    if is_lost_peer(error):
        reason = re.sub(r"^\[\S+\] ", "", text).partition(". ")[0]
        return (
            f"another rank has gone without a message: it was killed or lost its network ({_shorten(reason)})",
            False,
        )
    full = _disk_full_in(error)
    if full is not None:
        advice = "free space there, or set output_dir to a folder on another disk"
        return f"{_path_of(full) or 'a file'} could not be written, the disk is full: {advice}", False
    if isinstance(error, OSError):
        return _os_error(error, text), False
    if any(kind.endswith(".SafetensorError") for kind in kinds):
        return f"{_path_of(error) or 'a safetensors file'} cannot be read or written: {text}", False
    return f"{type(error).__name__}: {_shorten(text)} (this is a defect: please report it with the traceback)", True


def is_lost_peer(error: BaseException) -> bool:
    """Whether a call failed because another rank, or the network to it, has gone."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_PEER)


def exit_code(error: BaseException) -> int:
    """Exit status of a command that ended with this error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


def _disk_full_in(error: BaseException | None) -> BaseException | None:
    """The full disk behind an error, if that is what it comes from. Libraries wrap it in errors of their own."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return error
        if any(sign in str(error) for sign in _DISK_FULL_TEXTS):
            return error
        error = error.__cause__ or error.__context__
    return None


def _os_error(error: OSError, text: str) -> str:
    if error.strerror is None:
        return text or type(error).__name__
    path = _path_of(error)
    return f"{path}: {error.strerror}" if path else error.strerror


def _path_of(error: BaseException) -> str:
    """The path of a failed read or write: the error's own, or from the innermost frame with a variable named so."""
    own = getattr(error, "filename", None)
    if own is not None:
        return str(own)
    if isinstance(error, OSError) and error.errno not in (*_DISK_FULL, errno.EIO):
        return ""  # a socket's error, say
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
