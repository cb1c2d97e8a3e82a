"""Output to a closed pipe or terminal: ``… --help | head``, a run whose ``tee`` has exited, a closed terminal."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TextIO

_CLOSED = (errno.EPIPE, errno.EIO, errno.ENXIO)  # EPIPE for a pipe, the others for a terminal


def print_and_leave(text: str) -> NoReturn:
    """Print ``text`` and exit with status 0, even if the pipe is closed; with 1 if stdout fails in another way."""
    try:
        print(_encodable(text, sys.stdout), flush=True)
    except OSError as error:
        _to_nowhere(sys.stdout)
        if error.errno in _CLOSED:
            sys.exit(0)
        print(f"error: cannot write to standard output: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def leave_with_help(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """If ``arguments`` contain ``-h`` or ``--help``, print the help of ``parser`` and exit with status 0."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print_and_leave(parser.format_help().rstrip())


@contextlib.contextmanager
def surviving_closed_output() -> Iterator[None]:
    """Discard output to a closed stdout or stderr within this context, instead of failing."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and _Surviving(stream) for stream in before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Surviving:
    """A text stream that is redirected to the null device once its pipe or terminal is closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to the stream; tolerate a closed pipe and escape characters that cannot be encoded."""
        with self._discarding():
            return self._stream.write(_encodable(text, self._stream))
        return len(text)

    def flush(self) -> None:
        """Flush the stream; tolerate a closed pipe."""
        with self._discarding():
            self._stream.flush()

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            _to_nowhere(self._stream)


def _encodable(text: str, stream: TextIO) -> str:
    """Escape the characters that the encoding of ``stream`` does not support."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text if text.isascii() else text.encode(encoding, "backslashreplace").decode(encoding)


def _to_nowhere(stream: TextIO) -> None:
    """Redirect the stream's file descriptor to the null device; this covers buffered text and C++ libraries too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
