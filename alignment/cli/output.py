"""Output to a closed pipe or terminal: ``… --help | head``, a run whose ``tee`` has exited, a closed terminal."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

_CLOSED = (errno.EPIPE, errno.EIO, errno.ENXIO)  # EPIPE for a pipe, the others for a terminal


def print_and_leave(text: str) -> NoReturn:
    """Print ``text`` and exit with status 0, even if the pipe is closed."""
    with surviving_closed_output():
        print(text, flush=True)
    sys.exit(0)


def leave_with_help(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """If ``arguments`` contain ``-h`` or ``--help``, print the help of ``parser`` and exit with status 0."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print_and_leave(parser.format_help().rstrip())


@contextlib.contextmanager
def surviving_closed_output() -> Iterator[None]:
    """Discard output to a closed stdout or stderr within this context, instead of failing."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and _Stream(stream) for stream in before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Stream:
    """A text stream that escapes what it cannot encode, and discards everything once it is closed at the other end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._call(self._stream.write, text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._call(self._stream.flush)

    def _call(self, method: Callable[..., object], *arguments: str) -> None:
        try:
            method(*arguments)
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)  # for buffered text and the libraries in C++ as well
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
