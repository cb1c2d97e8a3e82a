"""Upload the model of a run when its trainer is asked to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo

from alignment.config.errors import HubError, OptionError, OutputError, did_you_mean
from alignment.engines.collectives import from_first_rank, on_first_rank
from alignment.run.console import tell
from alignment.training.context import RunContext
from alignment.training.hub.card import Details
from alignment.training.hub.process import CUT_OFF, Answer
from alignment.training.hub.repository import prepared_repository
from alignment.training.hub.uploads import Uploads

_DETAILS = {field.name for field in dataclasses.fields(Details)}


class Publisher:
    """Uploads the trained model of a run on request: what the Hub methods of its trainer do.

    Args:
        context: the run.
        uploads: its uploads.
        save_model: writes the model to the output folder.
    """

    def __init__(self, context: RunContext, uploads: Uploads, save_model: Callable[[], None]) -> None:
        self.context, self.uploads, self._save_model = context, uploads, save_model
        self.output_dir = context.output_dir

    @property
    def model_id(self) -> str | None:
        """The repository with its owner; until the owner is known, the value of the option."""
        repository = self.uploads.repository
        return self.context.args.hub_model_id if repository is None or not repository.known else repository.name

    def use(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository if needed, and check that it is writable; collective."""
        context = self.context
        self.uploads.use(prepared_repository(context.args, context.retries, token, private, resumes=False))

    def create_model_card(self, **details: Any) -> None:
        """See the trainer's ``create_model_card``."""
        for name in details:
            if name not in _DETAILS:
                raise TypeError(f"create_model_card: unexpected argument {name!r}{did_you_mean(name, _DETAILS)}")
        self.uploads.details = replace(self.uploads.details, **{k: v for k, v in details.items() if v is not None})
        on_first_rank(self._write_card)

    def _write_card(self) -> None:
        try:
            self.uploads.write_card(self.output_dir)
        except OSError as error:
            raise OutputError(f"output_dir: cannot write the model card: {error}") from error

    def push(
        self,
        commit_message: str | None,
        blocking: bool,
        token: str | None,
        revision: str | None,
        private: bool | None,
        **details: Any,
    ) -> CommitInfo | Future[Answer] | None:
        """See the trainer's ``push_to_hub``."""
        if self.uploads.repository is None:
            self.use(token, private)
        with self.uploads.held():
            self._save_model()
        self.create_model_card(**details)
        self.context.events("on_push_begin")
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
                self.use()
            if folder == self.output_dir:
                self.create_model_card()
            self.context.events("on_push_begin")
            self._begun(folder, "Model save", None, None)
        except (HubError, OptionError, OutputError) as error:
            tell(f"{error}; training is not affected")
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
