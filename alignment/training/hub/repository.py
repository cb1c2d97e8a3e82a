"""The repository of a run's uploads, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id

from alignment.config.errors import OptionError, is_placeholder, setting
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import on_first_rank
from alignment.run.console import tell
from alignment.run.retries import Retries
from alignment.training.hub.process import HubCall
from alignment.training.hub.pushes import Call

_CHECK_S = 60.0


@dataclass(frozen=True)
class Repository:
    """The destination of uploads.

    Attributes:
        name: with its owner, unless the Hub could not be reached.
        known: whether it is known to exist and to be writable.
        token: None uses the token of the login.
        private: whether the repository is created as private; None uses the owner's default.
        revision: the branch; None for ``main``.
    """

    name: str
    known: bool = False
    token: str | None = None
    private: bool | None = None
    revision: str | None = None

    def __repr__(self) -> str:
        return f"Repository({self.name!r}, revision={self.revision!r})"  # without the token

    def request(self, parts: list[dict[str, Any]], *, create: bool = True) -> dict[str, Any]:
        """Return a request for :mod:`worker`."""
        return {
            "repo": self.name,
            "known": self.known,
            "token": self.token,
            "private": self.private,
            "revision": self.revision,
            "create": create,
            "parts": parts,
        }


class _Unreachable(ConnectionError):
    """A failure that :class:`Retries` repeats."""


def named_repository(args: AlignmentConfig, token: str | None = None, private: bool | None = None) -> Repository:
    """Return the repository named by the options, without contacting the Hub.

    Args:
        args: the run's options.
        token: replaces ``hub_token``.
        private: replaces ``hub_private_repo``.

    Raises:
        OptionError: if the name or the token is invalid.
    """
    given = args.hub_model_id
    name = given or Path(args.output_dir or "").absolute().name
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        option = (
            setting("hub_model_id", given) if given else f"hub_model_id: not set, and the output folder's name {name}"
        )
        why = " ".join(str(error).split())
        raise OptionError(
            f"{option} is not a valid repository name: {why}; set hub_model_id to a name such as me/my-model"
        ) from None
    token = token if token is not None else args.hub_token
    token = None if is_placeholder("hub_token", token) else token
    if token is not None and (not token or not token.isascii() or any(c.isspace() for c in token)):
        raise OptionError("hub_token=<hidden>: is not a valid token: it is empty or contains invalid characters")
    private = private if private is not None else args.hub_private_repo
    return Repository(name, token=token, private=private, revision=args.hub_revision)


def ready_repository(
    repository: Repository,
    retries: Retries,
    *,
    create: bool = True,
    call: Callable[[], Call] = HubCall,
) -> Repository:
    """Identify the owner of the token, and create the repository and its branch if they do not exist.

    Args:
        repository: as named by the options.
        retries: retry policy if the Hub cannot be reached.
        create: False only checks.
        call: sends the request.

    Returns:
        The repository with its owner.

    Raises:
        OptionError: if there is no token, it is rejected or lacks write access, or there is no network.
        ConnectionError: if the Hub could not be reached, or was busy.
    """

    def ask() -> Repository:
        answer = call()(repository.request([], create=create), _CHECK_S)
        if answer.error is None:
            return replace(repository, name=answer.repo, known=create)
        if answer.transient:
            raise _Unreachable(answer.error)
        raise OptionError(f"push_to_hub: {answer.error}")

    return retries("push_to_hub", ask)


def prepared_repository(
    args: AlignmentConfig,
    retries: Retries,
    token: str | None = None,
    private: bool | None = None,
    *,
    resumes: bool,
) -> Repository:
    """Return the repository of the options, created and checked on the first rank; collective.

    Args:
        args: the run's options.
        retries: retry policy if the Hub cannot be reached.
        token: replaces ``hub_token``.
        private: replaces ``hub_private_repo``.
        resumes: whether the run resumes; then an unreachable Hub is only a warning.

    Raises:
        OptionError: if the repository is not available, or the Hub cannot be reached.
    """

    def ready() -> Repository:
        repository = named_repository(args, token, private)
        try:
            return ready_repository(repository, retries, create=not args.dry_run)
        except ConnectionError as error:
            if not resumes:
                raise OptionError(
                    f"push_to_hub: cannot reach the Hub: {error}; try again, or set push_to_hub: false"
                ) from None
            tell(f"warning: push_to_hub: cannot reach the Hub: {error}; uploads are attempted anyway")
            return repository

    found: Repository = on_first_rank(ready)
    return found
