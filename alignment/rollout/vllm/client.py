"""A client of a vLLM server: completions of token ids, adapters, weights, sleep. Seen with vLLM 0.32.

Requests are repeated after lost connections and HTTP 5xx, until ``vllm_server_timeout`` seconds have passed without a
response. Other errors are raised immediately. No message contains the API key.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from alignment.config.errors import OptionError, TrainingError, one_line, setting
from alignment.run.activity import ACTIVITY
from alignment.run.stop import REQUESTS, Cut

KEY = "VLLM_API_KEY"  # vLLM reads the same environment variable
SERVE = "`deepspeed-alignment vllm-serve RECIPE` prints the command that starts a server"
_GENERATE = "/inference/v1/generate"
_MOST_REQUESTS = 256  # at the same time; more would only wait in the server's queue
_STOPPING_S = 10.0  # that a call may take once a stop is requested


class Choice(NamedTuple):
    """A completion."""

    ids: tuple[int, ...]  #: its tokens, with the one that ended it
    logps: tuple[float, ...]  #: their raw log-probs
    versions: tuple[str, ...]  #: those of the weights that made it


class ServerInfo(NamedTuple):
    """What a server is."""

    model: str  #: the name of the base model in requests
    root: str  #: where it was loaded from
    max_length: int  #: the largest length of prompt and completion together, in tokens
    config: Mapping[str, Any]  #: vLLM's configuration as JSON, and the variables of its environment as ``env``


class Client:
    """Sends requests to one server, without following redirects, and without proxies of the environment.

    ``timeout`` is ``vllm_server_timeout``. If ``key`` is None, the API key is that of the environment. While a request
    waits, ``check`` is called every second; it raises if there will be no response.
    """

    def __init__(
        self, url: str, timeout: float = 240.0, key: str | None = None, check: Callable[[], None] | None = None
    ) -> None:
        self._check = check or (lambda: None)
        self._key = os.environ.get(KEY, "").strip() if key is None else key
        self.url, self.timeout = url, timeout
        if not (self._key.isascii() and self._key.isprintable()):
            raise OptionError(f"the environment variable {KEY} contains characters that a key cannot have")
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=None,  # see _run
            limits=httpx.Limits(max_connections=_MOST_REQUESTS),
            trust_env=False,
        )
        self._moved, self._said = 0.0, ""  # when the newest response came, and what the newest failure was
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="alignment-vllm", daemon=True).start()

    def info(self) -> ServerInfo:
        """Ask what the server is; raise if it is not vLLM, or has no development endpoints."""
        if self._call("GET", "/version", or_status=404) is None:
            trl = self._call("GET", "/get_world_size/", or_status=404) is not None
            what = "a server of `trl vllm-serve`, which has another protocol" if trl else "not a server of vLLM"
            raise self.error(f"this is {what}; {SERVE}")
        base = next(each for each in self._call("GET", "/v1/models")["data"] if each["parent"] is None)
        found = self._call("GET", "/server_info", params={"config_format": "json"})
        config = {**found["vllm_config"], "env": found["vllm_env"]}
        return ServerInfo(base["id"], base["root"], base["max_model_len"], config)

    def state(self) -> tuple[str, bool, bool]:
        """Return the version of the weights, ``default`` until one is set, and whether it sleeps and is paused."""
        version, asleep = self._call("GET", "/weight_info"), self._call("GET", "/is_sleeping")
        return version["weight_version"], asleep["is_sleeping"], self._call("GET", "/is_paused")["is_paused"]

    def generate(self, bodies: Sequence[Mapping[str, Any]]) -> list[list[Choice]]:
        """Return the choices of requests of ``/inference/v1/generate`` with ``logprobs``, all sent at the same time.

        Raises Cut once a stop is requested; the server then drops the requests, too.
        """

        async def everything() -> list[Any]:
            tasks = [asyncio.ensure_future(self._answer("POST", _GENERATE, json=body)) for body in bodies]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

        answers = self._run(everything(), cuts=True)
        return [[self._choice(each) for each in sorted(a["choices"], key=lambda c: c["index"])] for a in answers]

    def _choice(self, choice: Mapping[str, Any]) -> Choice:
        if choice["finish_reason"] not in ("stop", "length"):
            reason = f"a completion ended with {choice['finish_reason']!r}"
            raise self.error(f"{reason}; does another run pause this server, or let it sleep?")
        logps = tuple(token["logprob"] for token in choice["logprobs"]["content"])
        versions = tuple(dict.fromkeys(span["version"] for span in choice["weight_versions"] or ()))
        return Choice(tuple(choice["token_ids"]), logps, versions)

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load a PEFT folder, which the server sees under the same path, as the model ``name``."""
        body = {"lora_name": name, "lora_path": str(folder)}
        if self._call("POST", "/v1/load_lora_adapter", or_status=400, json=body) is None:
            said, models = self._said, self._call("GET", "/v1/models")["data"]
            if (name, str(folder)) not in [(each["id"], each["root"]) for each in models]:
                raise self.error(said)  # otherwise, the response to an earlier attempt was lost

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter, unless it is not loaded."""
        self._call("POST", "/v1/unload_lora_adapter", or_status=404, json={"lora_name": name})

    def reload(self, folder: Path) -> None:
        """Replace the weights by those of a folder, which the server sees under the same path."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._call("POST", "/collective_rpc", json=body)

    def pause(self) -> None:
        """Abort requests in progress; later ones wait for :meth:`resume`."""
        self._call("POST", "/pause")

    def resume(self) -> None:
        """End a pause."""
        self._call("POST", "/resume")

    def reset_prefix_cache(self) -> None:
        """Drop the keys and values of earlier prompts."""
        if not self._call("POST", "/reset_prefix_cache")["success"]:
            raise self.error("its prefix cache is in use; does another run use this server?")

    def set_version(self, version: str) -> None:
        """Set the version of the weights that all further choices carry."""
        self._call("POST", "/update_weight_version", json={"new_version": version})

    def sleep(self, level: int) -> None:
        """Free memory: level 1 moves the weights to the host, level 2 drops them."""
        self._call("POST", "/sleep", params={"level": level})

    def wake(self) -> None:
        """End sleep."""
        self._call("POST", "/wake_up")

    def close(self) -> None:
        """Close the connections, at most once."""
        wait([asyncio.run_coroutine_threadsafe(self._http.aclose(), self._loop)], _STOPPING_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def error(self, text: str) -> TrainingError:
        """Return an error that names the server, without the key."""
        return TrainingError(f"vLLM at {self.url}: {text.replace(self._key, '<hidden>') if self._key else text}")

    def _call(self, method: str, path: str, or_status: int = 0, **content: Any) -> Any:
        """Return the response to a request; None if its status is ``or_status``."""
        return self._run(self._answer(method, path, or_status, **content))

    def _run(self, coroutine: Coroutine[Any, Any, Any], cuts: bool = False) -> Any:
        """Wait for a coroutine; raise when no response has come for too long. As this is bounded, it is no hang."""
        self._moved, self._said, told = time.monotonic(), "", False
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not wait([future], min(1.0, self.timeout)).done:
                ACTIVITY.progress()
                self._check()
                stopping = REQUESTS.may_cut and REQUESTS.asked() is not None
                if stopping and cuts:
                    raise Cut
                if self._said and not told:
                    print(f"{self.error(self._said)}; trying again", flush=True)
                    told = True
                if time.monotonic() - self._moved > (min(self.timeout, _STOPPING_S) if stopping else self.timeout):
                    limit = "before the run has to stop" if stopping else setting("vllm_server_timeout", self.timeout)
                    raise self.error(f"{self._said or 'no response'} ({limit}); is it running? {SERVE}")
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _answer(self, method: str, path: str, or_status: int = 0, **content: Any) -> Any:
        """Send a request until it succeeds, or must not be repeated."""
        pause = 0.25
        while True:
            try:
                response = await self._http.request(method, path, **content)
                status, is_json = response.status_code, "json" in response.headers.get("Content-Type", "")
                found: Any = response.json() if is_json else response.text
                if status < 300:
                    self._moved = time.monotonic()
                    return found
                error = found.get("error", found) if is_json else found
                text = error.get("message", error) if isinstance(error, dict) else error
                self._said = f"{path}: HTTP {status}: {' '.join(str(text).split())[:300] or 'no reason'}"
                if status == or_status:
                    return None
                if status < 500:
                    missing = status == 404 and found == {"detail": "Not Found"}
                    raise self.error(f"{self._said}{_advice(path, status, missing)}")
            except httpx.TransportError as error:
                self._said = f"{path}: {type(error).__name__}: {one_line(error)}"
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)


def _advice(path: str, status: int, missing: bool) -> str:
    """Return what to do about a response, after a semicolon; ``missing``: the server has no such path."""
    if status == 401:
        return f"; set the environment variable {KEY} to the key of the server"
    if path == _GENERATE and (missing or status == 403):
        return "; start vllm serve with --enable-scale-out"
    if path == _GENERATE and status == 404:
        return "; the server was restarted, or another run has unloaded its adapter"
    if missing and "lora" in path:
        return "; start vllm serve with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    return "; start vllm serve with VLLM_SERVER_DEV_MODE=1" if missing else ""
