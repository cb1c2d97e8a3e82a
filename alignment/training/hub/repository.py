"""The repository that a run uploads to, made sure of before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id

from alignment.config.errors import OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.engines.watch.retries import Retries
from alignment.training.hub.process import HubCall
from alignment.training.hub.pushes import Call

_CHECK_S = 60.0
_MASKED = "<HUB_TOKEN>"  # in its place in an options.json that a run is repeated from


@dataclass(frozen=True)
class Repository:
    """Where to upload to.

    Attributes:
        name: with its owner, unless the hub could not be asked yet.
        known: whether it is there and may be written, as far as can be seen.
        token: None: the one that is logged in.
        private: whether it is made private where it is not there yet; None: as its owner's default is.
        revision: the branch; None: ``main``.
    """

    name: str
    known: bool = False
    token: str | None = None
    private: bool | None = None
    revision: str | None = None

    def __repr__(self) -> str:
        return f"Repository({self.name!r}, revision={self.revision!r})"  # without the token

    def request(self, parts: list[dict[str, Any]], *, create: bool = True) -> dict[str, Any]:
        """What :mod:`worker` is asked."""
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
    """Of a kind that :class:`Retries` repeats."""


def named_repository(args: AlignmentConfig, token: str | None = None, private: bool | None = None) -> Repository:
    """The repository as the options name it; the hub is not asked.

    Args:
        args: the options.
        token: in place of ``hub_token``.
        private: in place of ``hub_private_repo``.

    Raises:
        OptionError: it cannot have that name, or the token is none.
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
        raise OptionError(f"{option} cannot name a repository: {why}; set it to a name such as me/my-model") from None
    token = token if token is not None else args.hub_token
    token = None if token == _MASKED else token
    if token is not None and (not token or not token.isascii() or any(c.isspace() for c in token)):
        raise OptionError("hub_token=<hidden>: is no token: it is empty, or has characters that none has")
    private = private if private is not None else args.hub_private_repo
    return Repository(name, token=token, private=private, revision=args.hub_revision)


def ready_repository(
    repository: Repository,
    retries: Retries,
    *,
    create: bool = True,
    call: Callable[[], Call] = HubCall,
) -> Repository:
    """Ask the hub who the token belongs to, and make the repository and its branch where they are not there.

    Args:
        repository: as it is named.
        retries: where the hub cannot be reached.
        create: False: only look.
        call: asks.

    Returns:
        The same with its owner.

    Raises:
        OptionError: there is no token, it is not accepted, or may not write there, or there is no network.
        ConnectionError: the hub could not be reached, or was too busy.
    """

    def ask() -> Repository:
        answer = call()(repository.request([], create=create), _CHECK_S)
        if answer.error is None:
            return replace(repository, name=answer.repo, known=create)
        if answer.transient:
            raise _Unreachable(answer.error)
        raise OptionError(f"push_to_hub: {answer.error}")

    return retries("push_to_hub", ask)
