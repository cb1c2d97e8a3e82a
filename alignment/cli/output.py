"""Output to a closed pipe or terminal: ``… --help | head``, a run whose ``tee`` has exited, a closed terminal."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO

from alignment.config.errors import AlignmentError, one_line

_CLOSED = (errno.EPIPE, errno.EIO, errno.ENXIO)  # EPIPE for a pipe, the others for a terminal


def print_and_leave(text: str) -> NoReturn:
    """Print ``text`` and exit with status 0, even if the pipe is closed."""
    with surviving_closed_output():
        print(text, flush=True)
    sys.exit(0)


def parse_arguments(parser: ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """Parse the arguments of a command, whose help may go to a closed pipe."""
    with surviving_closed_output():
        try:
            return parser.parse_args(argv)
        finally:
            print(end="", flush=True)


def run_reader(run: Callable[[Namespace], None], parser: ArgumentParser, argv: Sequence[str] | None) -> NoReturn:
    """Parse the arguments of a command that only reads and prints, run it, and exit.

    The status is 0, also after Ctrl-C, 1 after an error, which is printed in one line, or 2 after a usage error.
    """
    code, options = 0, parse_arguments(parser, argv)
    with surviving_closed_output():
        try:
            run(options)
        except KeyboardInterrupt:
            pass
        except (AlignmentError, OSError) as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
            code = 1
    sys.exit(code)


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
