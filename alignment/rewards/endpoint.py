"""Judges behind an HTTP API: OpenAI-compatible endpoints, including OpenAI's.

An API key is read from the environment for each request and only sent to the configured URL. It is never stored in an
attribute, a message, the log or the saved options.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from alignment.config.errors import OptionError, RewardError, listing, setting
from alignment.rewards.asking import Broken, Busy, ModelJudge, NoAnswer, check_number

_OPENAI = "https://api.openai.com/v1"
_LARGEST = 1 << 20  # maximum size of a response in bytes
_SAID = 200  # maximum number of characters of an error that are quoted


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Rejects redirects, because the API key must only be sent to the configured URL."""

    def redirect_request(self, *args: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


class EndpointJudge(ModelJudge):
    """Asks a model at an OpenAI-compatible endpoint (vLLM, llama.cpp, SGLang, OpenAI …) with ``/chat/completions``.

    Args:
        model: name of the model at the endpoint.
        base_url: URL including the version, such as ``http://localhost:8000/v1``.
        system_prompt: see :class:`.ModelJudge`, as for all arguments that are not listed here.
        api_key_env: environment variable with the API key; if it is unset, no key is sent.
        timeout: seconds for a complete response.
        max_tokens: maximum number of tokens of an answer; reasoning models need more.
        extra_body: additional keys of every request; null removes a default key
            (``{"max_tokens": null, "max_completion_tokens": 16}``).

    Raises:
        OptionError: an argument is invalid.
    """

    def __init__(
        self,
        model: str,
        base_url: str,
        system_prompt: str | None = None,
        *,
        api_key_env: str = "OPENAI_API_KEY",
        timeout: float = 60.0,
        max_tokens: int = 16,
        extra_body: Mapping[str, Any] | None = None,
        **asking: Any,
    ) -> None:
        super().__init__(system_prompt, **asking)
        for name, text in (("model", model), ("base_url", base_url), ("api_key_env", api_key_env)):
            if not isinstance(text, str) or not text.strip():
                raise OptionError(f"{setting(name, text)}: expected a non-empty string")
        self.model, self.base_url, self.api_key_env = model, _checked_url(base_url), api_key_env
        check_number("timeout", timeout, 0.001, whole=False)
        check_number("max_tokens", max_tokens, 1, whole=True)
        self.timeout, self.max_tokens = float(timeout), max_tokens
        if extra_body is not None and not isinstance(extra_body, Mapping):
            raise OptionError(f"{setting('extra_body', extra_body)}: expected a mapping")
        self.extra_body = dict(extra_body or {})

    @property
    def where(self) -> str:
        return f"{self.model} at {self.base_url}"

    @property
    def identity(self) -> dict[str, Any]:
        names = ("model", "system_prompt", "both_orders", "max_tokens", "extra_body")
        return {name: getattr(self, name) for name in names}

    def ask(self, text: str) -> str | None:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            **self.extra_body,
        }
        content = self._request("POST", "chat/completions", {k: v for k, v in body.items() if v is not None})
        try:
            message = content["choices"][0]["message"]
            answer = message["content"]
        except (KeyError, IndexError, TypeError):
            raise Busy("its response has no choices[0].message.content") from None
        return answer if isinstance(answer, str) and not message.get("refusal") else None

    def check(self, retries: int | None = None) -> None:
        """Check that the endpoint is available and, if it supports ``/models``, that it serves the model.

        Args:
            retries: overrides the judge's retries.

        Raises:
            RewardError: the endpoint is unavailable, or does not serve the model.
        """
        retries = self.retries if retries is None else retries
        for number in range(retries + 1):
            try:
                content = self._request("GET", "models")
                break
            except NoAnswer as error:
                if not isinstance(error, Busy) and error.status not in (401, 403):
                    return  # /models is not supported
                if not isinstance(error, Busy) or number == retries:
                    raise RewardError(f"judge {self.where}: {error}") from None
                time.sleep(min(self.pause * 2**number, 60.0))
        entries = content.get("data") if isinstance(content, dict) else None
        served = [str(each["id"]) for each in entries or () if isinstance(each, dict) and "id" in each]
        # Only trust short lists: long ones may be paginated (OpenAI's), and names may have aliases.
        if served and len(served) <= 8 and self.model not in served and self.base_url != _OPENAI:
            raise RewardError(f"judge {self.where}: it serves {listing(served)}; set model to one of them")

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the JSON of the response.

        Raises:
            NoAnswer: the request failed.
        """
        key = os.environ.get(self.api_key_env, "").strip()
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else json.dumps(body).encode()
        end = time.monotonic() + self.timeout
        try:
            request = urllib.request.Request(f"{self.base_url}/{path}", data, headers, method=method)
            with _OPENER.open(request, timeout=self.timeout) as response:
                content = _read(response, end)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error, key) from None
        except TimeoutError:
            raise Busy(f"no answer within {self.timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, TimeoutError):
                raise Busy(f"no answer within {self.timeout:g} s") from None
            raise Busy(f"{type(reason).__name__}: {reason}" if str(reason) else type(reason).__name__) from None
        except ValueError:  # a key with a line break; do not quote it
            raise Broken(f"the key in {self.api_key_env} contains invalid characters; set it again") from None
        if content is None:
            raise Busy(f"no complete response within {self.timeout:g} s, or more than {_LARGEST} bytes")
        try:
            return json.loads(content)
        except ValueError:
            raise Busy("its response is not JSON") from None

    def _refusal(self, error: urllib.error.HTTPError, key: str) -> NoAnswer:
        """Convert an HTTP status other than 200 to an error."""
        status = error.code
        if status in (401, 403):  # the text may contain the key, or part of it
            held = f"the key in {self.api_key_env} was rejected" if key else f"set {self.api_key_env} to an API key"
            return Broken(f"HTTP {status}; {held}", status)
        try:
            said = _said(_read(error, time.monotonic() + self.timeout) or b"")
        except (OSError, http.client.HTTPException):
            said = ""
        said = said.replace(key, "<hidden>") if key else said
        text = f"HTTP {status}{f' ({said})' if said else ''}"
        if is_busy(status):
            return Busy(text, retry_after(error.headers.get("Retry-After")))
        if status == 404 or status < 400:
            return Broken(f"{text}; check base_url and model", status)
        return NoAnswer(text, status)


class OpenAIPairwiseJudge(EndpointJudge):
    """:class:`EndpointJudge` with TRL's name, arguments and defaults; does not need the package ``openai``.

    Args:
        model: name of the model at the endpoint.
        system_prompt: see :class:`.ModelJudge`.
        max_requests: see :class:`.ModelJudge`; with ``both_orders``, every pair takes two requests.
        base_url: None for ``OPENAI_BASE_URL`` from the environment, or else OpenAI's endpoint.
        **further: see :class:`EndpointJudge`.

    Raises:
        OptionError: an argument is invalid, or OpenAI's endpoint is used without a key.
    """

    def __init__(
        self,
        model: str = "gpt-4-turbo-preview",
        system_prompt: str | None = None,
        max_requests: int | None = 1000,
        *,
        base_url: str | None = None,
        **further: Any,
    ) -> None:
        url = base_url or os.environ.get("OPENAI_BASE_URL") or _OPENAI
        super().__init__(model, url, system_prompt, max_requests=max_requests, **further)
        if self.base_url == _OPENAI and not os.environ.get(self.api_key_env, "").strip():
            raise OptionError(
                f"judge: OpenAIPairwiseJudge needs an API key for {self.base_url}, but {self.api_key_env} is not set; "
                "set it, or pass the base_url of another endpoint"
            )


def _checked_url(url: str) -> str:
    """Return a base URL without a trailing slash.

    Raises:
        OptionError: the value is not a plain HTTP URL; a name, password or query would be saved with the options.
    """
    url = url.strip().rstrip("/")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        raise OptionError("base_url: not a valid URL; expected http://HOST:PORT/v1") from None
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise OptionError(
            "base_url: it contains a user name, a password or a query, which would be saved with the options; use "
            "http://HOST:PORT/v1, and store an API key in the environment variable named by api_key_env"
        )
    if not good:
        raise OptionError(f"{setting('base_url', url)}: not an HTTP URL; expected http://HOST:PORT/v1")
    return url.removesuffix("/chat/completions")


def _read(response: Any, end: float) -> bytes | None:
    """Read the body of a response; None if it is too long, or incomplete at the deadline."""
    content = bytearray()
    while part := response.read1(1 << 16):
        content += part
        if time.monotonic() > end or len(content) > _LARGEST:
            return None
    return bytes(content)


def _said(content: bytes) -> str:
    """Return the message of an error response as one short line; empty if there is none."""
    try:
        error = json.loads(content)
    except ValueError:
        return ""
    error = error.get("error", error.get("message")) if isinstance(error, dict) else None
    error = error.get("message") if isinstance(error, dict) else error
    text = " ".join(error.split()) if isinstance(error, str) else ""
    return text if len(text) <= _SAID else f"{text[: _SAID - 1]}…"


def is_busy(status: int) -> bool:
    """Return whether an HTTP status means that a retry may succeed."""
    return status in (408, 409, 425, 429) or status >= 500


def retry_after(value: str | None) -> float | None:
    """Return the seconds of an HTTP ``Retry-After`` header, a number or a date; None if it is missing or invalid."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
