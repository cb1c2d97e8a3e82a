"""A small HTTP server that follows the protocol of vLLM 0.32 as far as rollouts use it, with faults on request.

It samples from a tiny transformers model, so that its log-probs are right, and records every request.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM

GENERATE = "/inference/v1/generate"
RESTART = -1  # status: the server restarts, and closes the connection
_DEVELOPMENT = ("weight", "sleep", "server_info", "pause", "resume", "reset", "collective", "wake")
_NO_PATH: dict[str, Any] = {"detail": "Not Found"}


class Fault(NamedTuple):
    """What happens instead of a response: a status with a text; 0 closes the connection; 200 is only late."""

    status: int = 0
    text: str = ""
    wait: float = 0.0


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


class FakeVLLM:
    """The server of the model in a folder.

    Attributes:
        requests, queries: the path and the body, or the query, of each request.
        fault: called with the path of each request, and how many there were of it before; None: no fault.
        edit: changes the response to a request for completions.
        flags: what it was started with: ``scale-out``, ``dev`` and ``lora``.
        ignores_weights: whether it keeps its weights when they are replaced.
    """

    def __init__(self, model: str, key: str = "", port: int = 0, max_length: int = 64) -> None:
        self.folder, self.key, self.max_length = model, key, max_length
        self.config: dict[str, Any] = {
            "model_config": {"dtype": "torch.float32", "logprobs_mode": "raw_logprobs", "logits_processors": None,
                             "enable_sleep_mode": False},
            "scheduler_config": {"max_num_seqs": 16},
            "lora_config": {"max_lora_rank": 16},
            "device_config": {"device": "cuda"},  # on a CPU, vLLM does not reload every weight
        }  # fmt: skip
        self.requests, self.queries = list[tuple[str, Any]](), list[tuple[str, str]]()
        self.fault: Callable[[str, int], Fault | None] = lambda path, number: None
        self.edit: Callable[[dict[str, Any]], None] = lambda answer: None
        self.flags = {"scale-out", "dev", "lora"}
        self.trl = self.ignores_weights = False
        self.lock, self.released = threading.RLock(), threading.Event()
        self.restart()
        self._http = _Http(("127.0.0.1", port), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def restart(self) -> None:
        """Lose all state, as a new process."""
        with self.lock:
            self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
            self.version, self.adapters = "default", dict[str, tuple[str, Any]]()
            self.sleeping = self.paused = False

    def paths(self, *names: str) -> list[str]:
        """The paths of the requests so far, of these only."""
        return [path for path, _ in self.requests if not names or path in names]

    def bodies(self, path: str = GENERATE) -> list[Any]:
        """The bodies of the requests of a path."""
        return [body for each, body in self.requests if each == path]

    def answer(self, path: str, query: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the content of the response to a request."""
        missing = {"dev": any(word in path for word in _DEVELOPMENT), "lora": "lora" in path}
        if path == "/get_world_size/" and self.trl:
            return 200, {"world_size": 1}
        if self.trl or any(flag not in self.flags and there for flag, there in missing.items()):
            return 404, _NO_PATH
        if path == GENERATE:
            if "scale-out" not in self.flags:
                return 403, _error("Scale-out endpoints are disabled.")
            while (self.sleeping or self.paused) and not self.released.wait(0.01):
                pass
            with self.lock:
                return self._generate(body)
        with self.lock:
            return self._simple(path, query, body)

    def _simple(self, path: str, query: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            base = {"id": "base", "root": self.folder, "parent": None, "max_model_len": self.max_length}
            loaded = [{"id": name, "root": root, "parent": "base"} for name, (root, _) in self.adapters.items()]
            return 200, {"data": [*loaded, base]}
        if path == "/v1/load_lora_adapter":
            return self._load(body["lora_name"], body["lora_path"])
        if path == "/v1/unload_lora_adapter" and self.adapters.pop(body["lora_name"], None) is None:
            return 404, _error("The lora adapter cannot be found.")
        if path == "/collective_rpc" and not self.ignores_weights:
            folder = body["kwargs"]["weights_path"]
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path in ("/sleep", "/wake_up"):
            self.sleeping = path == "/sleep"
            if query == "level=2":
                self.model.apply(self.model._init_weights)  # as the weights are gone
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        found = {
            "/version": {"version": "0.32.0"},
            "/weight_info": {"weight_version": self.version},
            "/is_sleeping": {"is_sleeping": self.sleeping},
            "/is_paused": {"is_paused": self.paused},
            "/reset_prefix_cache": {"success": True},
            "/server_info": {
                "vllm_config": self.config,
                "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "lora" in self.flags},
            },
        }
        return 200, found.get(path, {})

    def _load(self, name: str, path: str) -> tuple[int, Any]:
        from peft import PeftModel

        if name in self.adapters:
            return 400, _error(f"The lora adapter '{name}' has already been loaded.")
        if not (Path(path) / "adapter_config.json").exists():
            return 404, _error(f"Loading lora {name} failed: No adapter found for {path}")
        base = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        adapted = base if self.ignores_weights else PeftModel.from_pretrained(base, path)
        self.adapters[name] = path, adapted.eval()
        return 200, "Success"

    def _generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        params, name = body["sampling_params"], body["model"]
        if name != "base" and name not in self.adapters:
            return 404, _error(f"The model `{name}` does not exist.")
        if len(body["token_ids"]) + params["max_tokens"] > self.max_length:
            return 400, _error("This model's maximum context length is exceeded.")
        model = self.model if name == "base" else self.adapters[name][1]
        choices = [self._choice(model, body["token_ids"], params, number) for number in range(params["n"])]
        answer = {"choices": choices[::-1]}  # the order has no meaning, as each has its index
        self.edit(answer)
        return 200, answer

    def _choice(self, model: Any, prompt: list[int], params: dict[str, Any], number: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(params["seed"] + number)
        ids, logps, reason = list[int](), list[float](), "length"
        while len(ids) < params["max_tokens"] and reason == "length":
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, -1].float()
            token = int(torch.multinomial((logits / params["temperature"]).softmax(-1), 1, generator=generator))
            ids.append(token)
            logps.append(float(logits.log_softmax(-1)[token]))
            reason = "stop" if token in params["stop_token_ids"] else "length"
        return {
            "index": number,
            "finish_reason": reason,
            "token_ids": ids,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
            "logprobs": {"content": [{"token_id": one, "logprob": logp} for one, logp in zip(ids, logps)]},
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeVLLM]:
        """Serve within this context."""
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield self
        finally:
            self.released.set()
            self._http.shutdown()
            self._http.server_close()


def _handler(server: FakeVLLM) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # headers and body in one packet, because the client's acknowledgment would take 40 ms

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._respond({})

        def do_POST(self) -> None:
            self._respond(json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}"))

        def _respond(self, body: dict[str, Any]) -> None:
            path, query = urlsplit(self.path)[2:4]
            with server.lock:
                number = len(server.paths(path))
                server.requests.append((path, body))
                server.queries.append((path, query))
                fault = server.fault(path, number)
            if fault is not None:
                server.released.wait(fault.wait)
                if fault.status == RESTART:
                    server.restart()
                if fault.status <= 0:
                    self.close_connection = True
                    return
                fault = None if fault.status == 200 else fault
            guarded = server.key and path.startswith(("/v1", "/inference"))
            if guarded and self.headers.get("Authorization") != f"Bearer {server.key}":
                fault = Fault(401, "Unauthorized")
            status, found = server.answer(path, query, body) if fault is None else (fault.status, _error(fault.text))
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client has disconnected
                self.wfile.write(content)

    return Handler


def _error(text: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": "Error", "param": None, "code": 0}}
