"""Description of an error: one line for the user, and whether it is a bug."""

from __future__ import annotations

import re
from collections.abc import Iterator

from alignment.config.errors import AlignmentError

# Errors of connections between ranks, by gloo and NCCL; op.preamble: the ranks disagree about the size of a tensor.
_LOST = re.compile(
    r"^Dist(Store|Network)Error|gloo/transport/(?!.*op\.preamble)|Gloo connectFullMesh|"
    r"NCCL.*(remote process|ncclRemoteError|ncclSystemError)|NCCL communicator was aborted",
    re.DOTALL,
)
_NOISE = re.compile(r"\[[^\]]*\.(cc|h):\d+\] |NCCL error in: \S+, |\. This is typically.*|Exception raised from.*")
_DISK_FULL = re.compile("No space left on device|Disk quota exceeded|PytorchStreamWriter failed")
# What to do about an error, by its class and message. A data loader worker is killed, or exits unexpectedly.
_ADVICE = {
    "OutOfMemoryError": "the GPU is out of memory: use a smaller per_device_train_batch_size or max_length, set "
    "gradient_checkpointing to true, or pass a DeepSpeed file that offloads",
    "MemoryError|DefaultCPUAllocator": "the host is out of memory: offload less, use a smaller model or more ranks",
    "DataLoader worker": "the host may have run out of memory: set dataloader_num_workers to 0",
    "DistBackendError": "NCCL failed: set NCCL_DEBUG=INFO in the environment for details",
    r"^wandb\.": "report_to: wandb failed: run `wandb login`, set WANDB_MODE=offline, or set report_to to none",
}
_FREE = "could not be written because the disk is full; free some space, or set output_dir to a folder on another disk"


class JoinError(AlignmentError):
    """This rank could not join the others, for the given reason."""


class OtherRankFailed(AlignmentError):
    """Another rank has failed, and reports why."""


def describe(error: BaseException) -> tuple[str, bool]:
    """Return one line for the user, and whether the error is a bug whose traceback is worth showing.

    The line is empty for a `SystemExit` with a status, whose message has already been written.
    """
    lost = next(filter(_is_lost, causes(error)), None)
    if lost is not None and not isinstance(error, JoinError):
        return (
            f"another rank exited without reporting an error, or the network to it is down ({reason_of(lost)})",
            False,
        )
    text = reason_of(error)
    if isinstance(error, AlignmentError):
        return " ".join(str(error).split()), False
    if isinstance(error, SystemExit):
        return (text if isinstance(error.code, str) else "" if error.code else "exited with status 0"), False
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by the user", False
    named = f"{type(error).__name__}: {text}"
    for pattern, advice in _ADVICE.items():
        if re.search(pattern, f"{type(error).__module__}.{named}"):
            return f"{advice} ({text})", False
    for each in causes(error):
        if _DISK_FULL.search(str(each)):
            return f"{getattr(each, 'filename', None) or 'a file'} {_FREE}", False
    if isinstance(error, OSError):
        return (f"{error.filename}: {error.strerror}" if error.filename else error.strerror or text), False
    return f"{named} (this is a bug; please report it with the traceback)", True


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error or a cause of it is that another rank has failed, or the network connection to it."""
    return isinstance(error, OtherRankFailed) or any(map(_is_lost, causes(error)))


def reason_of(error: BaseException) -> str:
    """The message of a library's error in one line, without tracebacks of workers, source locations and advice."""
    text = str(error)
    if "Original Traceback" in text:  # of an error in a data loader worker; the last line is the error
        text = text.strip().splitlines()[-1]
    text = _NOISE.sub("", " ".join(text.split())).strip()
    return text if len(text) <= 300 else text[:299] + "…"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, each once, including those hidden by ``raise … from None``."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_lost(error: BaseException) -> bool:
    text = f"{type(error).__name__}: {error}" if isinstance(error, RuntimeError) else ""
    return _LOST.search(text) is not None
