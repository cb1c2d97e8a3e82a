"""Output whose reader has gone: ``… --help | head``, a run whose ``tee`` has exited, a terminal that was closed."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TextIO

_CLOSED = (errno.EPIPE, errno.EIO, errno.ENXIO)  # of a pipe, and of a terminal


def print_and_leave(text: str) -> NoReturn:
    """Print ``text`` and exit with 0, also if nobody reads it any more; exit with 1 on any other error of stdout."""
    try:
        print(_encodable(text, sys.stdout), flush=True)
    except OSError as error:
        _to_nowhere(sys.stdout)
        if error.errno in _CLOSED:
            sys.exit(0)
        print(f"error: standard output cannot be written: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)


def leave_with_help(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Where ``arguments`` ask for help: print that of ``parser`` and exit, with 0 also if the pipe is closed."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print_and_leave(parser.format_help().rstrip())


@contextlib.contextmanager
def surviving_closed_output() -> Iterator[None]:
    """Within this context, writing to stdout or stderr never fails because nobody reads it: output is discarded."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and _Surviving(stream) for stream in before)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _Surviving:
    """A text stream that is redirected to the null device once its pipe or terminal is closed; else itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream's, but for a closed pipe or terminal, and for characters that the encoding lacks."""
        with self._discarding():
            return self._stream.write(_encodable(text, self._stream))
        return len(text)

    def flush(self) -> None:
        """As the stream's, but for a closed pipe or terminal."""
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
    """The text, with escapes in the place of what the encoding of ``stream`` does not have."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text if text.isascii() else text.encode(encoding, "backslashreplace").decode(encoding)


def _to_nowhere(stream: TextIO) -> None:
    """Redirect the descriptor of a stream to the null device, which covers buffered text and libraries in C++."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
