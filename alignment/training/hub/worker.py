"""A separate program that talks to the Hub, so that it can be killed at any time, whatever it waits for.

It reads one request as a line of JSON from its standard input, which its parent keeps open while it lives, and writes
the answer as the last line of its output. It imports only the Hub client.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

_BUSY = {408, 409, 425, 429, 500, 502, 503, 504}  # HTTP statuses that may be transient
_OFFLINE = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so nothing can be uploaded; unset it"


class Refused(Exception):
    """An error that a retry cannot fix."""


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out a request.

    Args:
        request: ``token`` (None uses the token of the login), ``repo``, ``known`` (whether it is known to be ready),
            ``private``, ``revision``, ``create`` (False only checks), and ``parts`` to upload, one commit each:
            ``folder``, ``path``, ``message``, and ``replaces``, patterns of files in ``path`` that are removed unless
            the folder has them.

    Returns:
        ``repo`` with its owner, and ``commits`` with ``url``, ``oid`` and ``message`` of each part; or ``error``, one
        line without the token, and whether it is ``transient``.
    """
    from huggingface_hub import HfApi

    token = request.get("token")
    api = HfApi(token=token, library_name="deepspeed-alignment")
    try:
        repo = request["repo"] if request["known"] else ready(api, request)
        return {"repo": repo, "commits": [_commit(api, repo, request.get("revision"), p) for p in request["parts"]]}
    except Exception as raised:  # each library used has its own error classes
        error, status = _cause(raised)
        told = _told(error, status, request["repo"], api.endpoint)
        told = told if token is None else told.replace(token, "<hidden>")
        final = isinstance(error, (Refused, ValueError)) or _is_offline(error)
        return {"error": told, "transient": not final and (status is None or status in _BUSY), "status": status}


def ready(api: Any, request: Mapping[str, Any]) -> str:
    """Ensure that there is a writable repository with the branch; return its name with the owner."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise Refused(_OFFLINE)
    try:
        user = api.whoami()
    except LocalTokenNotFoundError:
        raise Refused("no token found; run `hf auth login`, or set hub_token") from None
    if (user.get("auth") or {}).get("accessToken", {}).get("role") == "read":
        raise Refused(
            "the token is read-only; create a token with write access and run `hf auth login`, or set hub_token"
        )
    name = request["repo"]
    repo = name if "/" in name else f"{user['name']}/{name}"
    try:
        api.repo_info(repo)
    except RepositoryNotFoundError:
        if not request["create"]:
            return str(repo)
        repo = api.create_repo(repo, private=request.get("private"), exist_ok=True).repo_id
    revision = request.get("revision")
    if revision and revision != "main" and not revision.startswith("refs/") and request["create"]:
        api.create_branch(repo, branch=revision, exist_ok=True)
    return str(repo)


def _commit(api: Any, repo: str, revision: str | None, part: Mapping[str, Any]) -> dict[str, str]:
    info = api.upload_folder(
        repo_id=repo,
        folder_path=part["folder"],
        path_in_repo=part["path"] or None,
        commit_message=part["message"],
        revision=revision,
        delete_patterns=part["replaces"] or None,
    )
    return {"url": info.commit_url, "oid": info.oid, "message": part["message"]}


def _cause(error: BaseException) -> tuple[BaseException, int | None]:
    """Return the first error with an HTTP status among the causes, and the status; or the error itself and None."""
    each: BaseException | None = error
    while each is not None:
        status = getattr(getattr(each, "response", None), "status_code", None)
        if status is not None:
            return each, int(status)
        each = each.__cause__ or each.__context__
    return error, None


def _is_offline(error: BaseException) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error, OfflineModeIsEnabled)


def _told(error: BaseException, status: int | None, repo: str, endpoint: str) -> str:
    """Format the error on one line."""
    if isinstance(error, Refused):
        return str(error)
    if _is_offline(error):
        return _OFFLINE
    if status == 401:
        return f"{endpoint} rejected the token (HTTP 401); run `hf auth login`, or set hub_token"
    if status == 403:
        return f"the token has no write access to {repo} (HTTP 403); set hub_model_id to another repository"
    said = [line for line in str(error).splitlines() if not line.startswith("For more information")]
    lines = " ".join(" ".join(said).split()) or type(error).__name__
    return f"HTTP {status}: {lines[:300]}" if status is not None else f"{type(error).__name__}: {lines[:300]}"


def _end_with_parent() -> None:
    """Exit when the parent does: its end of the pipe is then closed."""
    while sys.stdin.buffer.read(1):
        continue
    os._exit(1)


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    found = json.dumps(answer(request))
    print(f"\n{found}", flush=True)
    os._exit(0)  # threads of the client may still be waiting


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules must not shadow the client's imports
    main()
