"""The repository of a run's uploads, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from alignment.config.errors import HubError, OptionError, is_placeholder, one_line
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import on_first_rank
from alignment.run.ranks import tell
from alignment.run.retries import Retries, is_transient


@dataclass(frozen=True)
class Repository:
    """The destination of uploads."""

    name: str  # with its owner, once known
    known: bool = False  # to exist and to be writable
    token: str | None = field(default=None, repr=False)  # None uses the token of the login
    private: bool | None = None  # None uses the owner's default
    revision: str | None = None  # the branch; None for main

    @property
    def api(self) -> HfApi:
        """A client of the Hub with the token."""
        return HfApi(token=self.token, library_name="deepspeed-alignment")

    def ready(self, create: bool = True) -> Repository:
        """Return it with the token's owner; create the repository and its branch if they do not exist."""
        user = self.api.whoami()
        if (user.get("auth") or {}).get("accessToken", {}).get("role") == "read":
            raise HubError("the token is read-only; run `hf auth login` with one that can write, or set hub_token")
        name = self.name if "/" in self.name else f"{user['name']}/{self.name}"
        try:
            self.api.repo_info(name)
        except RepositoryNotFoundError:
            if not create:
                return replace(self, name=name)
            name = self.api.create_repo(name, private=self.private, exist_ok=True).repo_id
        if create and self.revision and self.revision != "main" and not self.revision.startswith("refs/"):
            self.api.create_branch(name, branch=self.revision, exist_ok=True)
        return replace(self, name=name, known=create)

    def failure(self, error: BaseException) -> str:
        """Describe a failed request to the Hub on one line, without the token."""
        text = f"{type(error).__name__}: {one_line(error).rstrip('.')}"
        return (text.replace(self.token, "<hidden>") if self.token else text)[:400]


def prepared_repository(
    args: AlignmentConfig,
    retries: Retries,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
) -> Repository:
    """Return the repository of the options, created (except in a dry run) and checked on the first rank; collective.

    Arguments that are not None replace the options. If the run resumes, an unreachable Hub is only a warning.

    Raises:
        OptionError: if the token is invalid, the repository is not available, or the Hub cannot be reached.
    """
    token = token if token is not None else args.hub_token
    token = None if is_placeholder("hub_token", token) else token
    if token is not None and (not token or not token.isascii() or any(c.isspace() for c in token)):
        raise OptionError("hub_token=<hidden>: is not a valid token: it is empty or contains invalid characters")
    name = args.hub_model_id or Path(args.output_dir or "").absolute().name
    private = args.hub_private_repo if private is None else private
    repository = Repository(name, token=token, private=private, revision=revision or args.hub_revision)

    def ready() -> Repository:
        try:
            return retries("push_to_hub", lambda: repository.ready(create=not args.dry_run))
        except Exception as error:  # each library used has its own error classes
            said = f"push_to_hub: {repository.failure(error)}"
            if not is_transient(error) or not args.resume_from_checkpoint:
                raise OptionError(f"{said}; set hub_model_id and hub_token, or push_to_hub: false") from None
            tell(f"warning: {said}; uploads are attempted anyway")
            return repository

    return on_first_rank(ready)
