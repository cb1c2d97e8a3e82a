"""A local OpenAI-compatible endpoint whose responses are controlled by a test: slow, invalid, or missing."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """A response: a raw body, or the text of a message, after ``wait`` seconds; ``cut`` sends only half of it.

    ``drip``: seconds between two of its bytes.
    """

    text: str | None = None
    status: int = 200
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    wait: float = 0.0
    cut: bool = False
    refusal: str | None = None
    drip: float = 0.0

    def content(self) -> bytes:
        if self.body is not None:
            return self.body
        message = {"role": "assistant", "content": self.text, "refusal": self.refusal}
        return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # if the backlog is full, a connection waits for a second


class Server:
    """The endpoint. ``answer`` is called with the text of each question; ``most``: number of concurrent requests."""

    def __init__(self, answer: Callable[[str], Answer]) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most = self._now = 0
        self.lock, self.released = threading.Lock(), threading.Event()
        self._http = _Http(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # headers and body in one packet, because the client's acknowledgment would take 40 ms

            def log_message(self, *args: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server._now += 1
                    server.most = max(server.most, server._now)
                    server.bodies.append(body)
                    server.headers.append({name.title(): value for name, value in self.headers.items()})
                    server.asked.append(body["messages"][0]["content"])
                    answer = server.answer(server.asked[-1])
                if answer.wait:
                    server.released.wait(answer.wait)
                with server.lock:
                    server._now -= 1
                self._send(answer)

            def _send(self, answer: Answer) -> None:
                content = answer.content()
                if answer.status == 0:  # the connection is closed without a response
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name, value in answer.headers:
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                size = 1 if answer.drip else len(content) // 2 if answer.cut else len(content)
                with contextlib.suppress(OSError):  # the client has disconnected
                    for start in range(0, len(content), size):
                        self.wfile.write(content[start : start + size])
                        self.wfile.flush()
                        if answer.cut or server.released.wait(answer.drip):
                            break
                self.close_connection |= answer.cut

        return Handler

    @contextlib.contextmanager
    def running(self) -> Iterator[Server]:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield self
        finally:
            self.released.set()
            self._http.shutdown()
            self._http.server_close()


def serving(answer: Callable[[str], Answer]) -> contextlib.AbstractContextManager[Server]:
    """Run the endpoint within this context."""
    return Server(answer).running()


def sequence(*answers: Answer) -> Callable[[str], Answer]:
    """Return these answers in order, and the last one repeatedly."""
    left = list(answers)
    return lambda text: left.pop(0) if len(left) > 1 else left[0]
