"""The Hub methods of trainers, with the names and arguments of transformers and TRL."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitInfo

from alignment.config.errors import HubError, OptionError, OutputError, did_you_mean
from alignment.engines.collectives import from_first_rank, on_first_rank
from alignment.training.hub.card import Details
from alignment.training.hub.process import CUT_OFF, Answer
from alignment.training.hub.repository import Repository, named_repository, ready_repository
from alignment.training.hub.uploads import Uploads

if TYPE_CHECKING:
    from alignment.config.options import AlignmentConfig
    from alignment.run.retries import Retries
    from alignment.training.callbacks import Events

_DETAILS = {field.name for field in dataclasses.fields(Details)}


class HubMethods:
    """The part of a trainer that uploads trained models."""

    args: AlignmentConfig
    retries: Retries
    events: Events
    output_dir: Path
    uploads: Uploads

    if TYPE_CHECKING:

        def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None: ...

        def tell(self, text: str | None) -> None: ...

    @property
    def hub_model_id(self) -> str | None:
        """The repository with its owner; until the owner is known, the value of the option."""
        repository = self.uploads.repository
        return self.args.hub_model_id if repository is None or not repository.known else repository.name

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository if needed, and check that it is writable. All ranks must call it.

        Args:
            token: replaces ``hub_token``.
            private: replaces ``hub_private_repo``.

        Raises:
            OptionError: if the repository is not available, or the Hub cannot be reached.
        """
        self.uploads.use(self._repository(token, private, resumes=False))

    def _repository(
        self, token: str | None = None, private: bool | None = None, *, resumes: bool | None = None
    ) -> Repository:
        """Return the repository of the options, prepared on the first rank; collective."""
        resumes = bool(self.args.resume_from_checkpoint) if resumes is None else resumes

        def ready() -> Repository:
            repository = named_repository(self.args, token, private)
            try:
                return ready_repository(repository, self.retries, create=not self.args.dry_run)
            except ConnectionError as error:
                if not resumes:
                    raise OptionError(
                        f"push_to_hub: cannot reach the Hub: {error}; try again, or set push_to_hub: false"
                    ) from None
                self.tell(f"warning: push_to_hub: cannot reach the Hub: {error}; uploads are attempted anyway")
                return repository

        found: Repository = on_first_rank(ready)
        return found

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        **details: Any,
    ) -> None:
        """Write the model card, ``README.md`` in the output folder, unless someone else's card is there.

        Later uploads repeat these additions.

        Args:
            model_name: for the metadata; defaults to the name of the repository or of the output folder.
            dataset_name: the training dataset's name on the Hub.
            tags: added to those of the method.
            **details: further arguments of transformers: ``language``, ``license``, ``finetuned_from``, ``tasks``,
                ``dataset_tags``, ``dataset``, ``dataset_args``.

        Raises:
            TypeError: if an argument is unknown.
            OutputError: if the card cannot be written.
        """
        given = {"model_name": model_name, "dataset_name": dataset_name, "tags": tags, **details}
        for name in details:
            if name not in _DETAILS:
                raise TypeError(f"create_model_card: unexpected argument {name!r}{did_you_mean(name, _DETAILS)}")
        self.uploads.details = replace(self.uploads.details, **{k: v for k, v in given.items() if v is not None})
        on_first_rank(self._write_card)

    def _write_card(self) -> None:
        try:
            self.uploads.write_card(self.output_dir)
        except OSError as error:
            raise OutputError(f"output_dir: cannot write the model card: {error}") from error

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future[Answer] | None:
        """Save the model to the output folder and upload it with its card. All ranks must call it.

        Args:
            commit_message: message of the commit.
            blocking: wait until the upload has finished or failed.
            token: replaces ``hub_token``.
            revision: replaces ``hub_revision``.
            private: replaces ``hub_private_repo`` if the repository is created.
            **kwargs: see :meth:`create_model_card`.

        Returns:
            On the first rank, the commit, or with ``blocking=False`` a future; None on other ranks.

        Raises:
            OptionError: if the repository is not available.
            HubError: if the upload failed; the message has the command to upload manually.
        """
        if self.uploads.repository is None:
            self.init_hf_repo(token, private)
        with self.uploads.held():
            self.save_model()
        self.create_model_card(**kwargs)
        self.events("on_push_begin")
        future = self._begun(self.output_dir, commit_message, token, revision)
        if not blocking:
            return future
        self.uploads.wait()
        failure, answer = self._result(future)
        if failure is not None:
            raise HubError(f"push_to_hub: {failure}")
        if answer is None:
            return None
        commit = answer.commits[0]
        return CommitInfo(commit["url"], commit_message=commit["message"], commit_description="", oid=commit["oid"])

    def push_saved(self, folder: Path) -> None:
        """Upload the output of :meth:`save_model` and wait; a failure is only printed. Collective."""
        try:
            if self.uploads.repository is None:  # the option was set after the trainer was created
                self.init_hf_repo()
            if folder == self.output_dir:
                self.create_model_card()
            self.events("on_push_begin")
            self._begun(folder, "Model save", None, None)
        except (HubError, OptionError, OutputError) as error:
            self.tell(f"{error}; training is not affected")
            return
        self.uploads.wait()

    def _begun(
        self, folder: Path, message: str | None, token: str | None, revision: str | None
    ) -> Future[Answer] | None:
        future: list[Future[Answer] | None] = [None]

        def begin() -> None:
            try:
                future[0] = self.uploads.push(folder, message or "Upload model", token, revision)
            except OSError as error:
                raise HubError(f"push_to_hub: could not stage the model: {error}") from error

        on_first_rank(begin)
        return future[0]

    @staticmethod
    def _result(future: Future[Answer] | None) -> tuple[str | None, Answer | None]:
        """Return the error on every rank, and the answer on the first."""
        failure: str | None = None
        answer: Answer | None = None
        if future is not None:
            if not future.done():
                failure = CUT_OFF
            elif (error := future.exception()) is not None:
                failure = str(error)
            else:
                answer = future.result()
        failure = from_first_rank(failure)
        return failure, answer
