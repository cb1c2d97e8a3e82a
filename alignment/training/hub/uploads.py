"""The uploads of a run: what is sent at each save and at the end, and how failures are reported.

The first rank uploads; the others wait for it only when training is over. A failed upload never ends a
run.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from alignment.checkpoint.folder import checkpoint_folder
from alignment.config.errors import one_line
from alignment.engines.collectives import from_first_rank
from alignment.reporting.durable import replace_text
from alignment.run.activity import ACTIVITY
from alignment.run.console import tell
from alignment.run.stop import REQUESTS
from alignment.training.context import RunContext
from alignment.training.hub.card import Details, Subject, card_text, own_card
from alignment.training.hub.contents import (
    CARD,
    OPTIONS,
    WEIGHTS,
    checkpoint_files,
    model_files,
    published_options,
    removed_if_failed,
    stage,
)
from alignment.training.hub.process import CUT_OFF, Answer, HubCall
from alignment.training.hub.pushes import Call, Push, Pushes
from alignment.training.hub.repository import Repository

STAGING = ".hub-upload"  # in the output folder: files being uploaded, and those of failed uploads
LAST = "last-checkpoint"
_FAILURES = 3  # consecutive failures after which only the end of training retries
_GRACE_S = 5.0  # for an upload in progress when the run is asked to stop
_SLICE_S = 1.0


class Uploads(TrainerCallback):
    """Uploads checkpoints as they are saved, and models on request.

    Args:
        context: the run.
        subject: describes the model, for its card.
        call: creates the object that sends requests to the Hub.

    Attributes:
        repository: the destination; None until :meth:`use` is called.
        details: the caller's additions to the card, repeated by later cards.
        holds: whether saving a model currently does not upload it.
    """

    def __init__(
        self, context: RunContext, subject: Callable[[], Subject], call: Callable[[], Call] = HubCall
    ) -> None:
        self.context, self.args, self.state = context, context.args, context.state
        self._subject, self._call = subject, call
        self.repository: Repository | None = None
        self.details = Details()
        self.holds = False
        self._pushes: Pushes | None = None
        self._failures = self._number = 0
        self._unsent: int | None = None  # step of a checkpoint whose upload was skipped or failed

    def use(self, repository: Repository) -> None:
        """Set the destination."""
        self.repository = repository

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Give up uploads in progress if the body fails or is stopped."""
        try:
            yield
        except BaseException:
            self.cut_off()
            raise

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within this context, saving a model does not upload it."""
        before, self.holds = self.holds, True
        try:
            yield
        finally:
            self.holds = before

    # At each save ---------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the staged files of an earlier attempt."""
        if self.context.is_first and (self._pushes is None or not self._pushes.busy):
            shutil.rmtree(self.context.output_dir / STAGING, ignore_errors=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report finished uploads between steps."""
        self.report()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upload the saved checkpoint according to ``hub_strategy``."""
        if not self.context.is_first or self.repository is None or args.hub_strategy == "end":
            return
        self.report()
        last = state.global_step >= state.max_steps or control.should_training_stop
        if REQUESTS.reason is not None:  # the run is about to stop
            return
        busy = self._pushes is not None and self._pushes.busy
        if not last and (self._failures >= _FAILURES or (busy and not args.hub_always_push)):
            self._unsent = state.global_step
            return
        self._send_checkpoint(state.global_step, last=last)

    def _send_checkpoint(self, step: int, *, last: bool) -> None:
        source = checkpoint_folder(self.context.output_dir, step)
        named = f"step {step}" if self.args.save_strategy != "epoch" else f"epoch {int(self.state.epoch or 0)}"
        message = f"Training in progress, {named}"
        self._unsent = None
        try:
            push = self._staged(source, message, self._where(None, None), last=last)
            self._add_state(push, source, message)
        except Exception as error:  # no error here may end training
            self._tell_failure(f"step {step}", one_line(error))
            return
        self.context.events("on_push_begin")
        self._add(push)

    def _staged(self, source: Path, message: str, repository: Repository, *, last: bool) -> Push:
        """Stage model, tokenizer, options and card of a folder."""
        self._number += 1
        target = self.context.output_dir / STAGING / f"{self.state.global_step}-{self._number}"
        shutil.rmtree(target, ignore_errors=True)
        names = model_files(source, self.context.processing_class)
        texts = {OPTIONS: published_options(self.args.to_dict())}
        root = self.context.output_dir
        with removed_if_failed(target):
            if not own_card(root):
                texts[CARD] = self.card(source)
            size = stage(source, names, target / "model", texts)
            if own_card(root):
                stage(root, [CARD], target / "card")
                (target / "card" / CARD).replace(target / "model" / CARD)
        part = {"folder": str(target / "model"), "path": "", "message": message, "replaces": list(WEIGHTS)}
        return Push(
            label=source.name,
            step=self.state.global_step,
            request=repository.request([part]),
            folder=target,
            size=size,
            tries=1 + self.args.retries if last else 1,
            last=last,
        )

    def _add_state(self, push: Push, source: Path, message: str) -> None:
        """Add the checkpoint with all its files, with the strategies that upload checkpoints."""
        if self.args.hub_strategy not in ("checkpoint", "all_checkpoints"):
            return
        path = LAST if self.args.hub_strategy == "checkpoint" else source.name
        with removed_if_failed(push.folder):
            push.size += stage(source, checkpoint_files(source), push.folder / "checkpoint")
        part = {"folder": str(push.folder / "checkpoint"), "path": path, "message": f"{message}, checkpoint"}
        push.request["parts"].append({**part, "replaces": ["*"]})

    def _where(self, token: str | None, revision: str | None) -> Repository:
        assert self.repository is not None
        changed = dataclasses.replace(self.repository, token=token) if token else self.repository
        if revision is None or revision == changed.revision:
            return changed
        return dataclasses.replace(changed, revision=revision, known=False)

    def _add(self, push: Push) -> None:
        if self._pushes is None:
            self._pushes = Pushes(self._call(), self.args.retry_pause)
            atexit.register(self.at_exit)
        self._pushes.add(push)

    # At a caller's request, and at the end --------------------------------------------------------------------------

    def card(self, folder: Path) -> str:
        """Return the card of the model in a folder."""
        return card_text(folder, self._subject(), self.args.to_dict(), self.details)

    def write_card(self, folder: Path) -> None:
        """Write the card to a folder, unless someone else's is there; on the first rank.

        Raises:
            OSError: if it cannot be written.
        """
        if not own_card(folder):
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / CARD, self.card(folder))

    def push(
        self, folder: Path, message: str, token: str | None = None, revision: str | None = None
    ) -> Future[Answer] | None:
        """Queue an upload of the model in a folder; return its future on the first rank, None on others.

        Raises:
            OSError: if a file cannot be read or staged.
        """
        if not self.context.is_first:
            return None
        push = self._staged(folder, message, self._where(token, revision), last=True)
        self._unsent = None
        self._add(push)
        return push.future

    def finish(self) -> None:
        """At the end of training, upload the newest checkpoint if it was skipped, and wait; collective."""
        if self.context.is_first and self._unsent is not None and self.repository is not None:
            if checkpoint_folder(self.context.output_dir, self._unsent).is_dir():
                self._send_checkpoint(self._unsent, last=True)
        self.wait()

    def wait(self) -> None:
        """Wait for all uploads, only briefly if the run is asked to stop; collective."""
        with ACTIVITY("upload"):
            grace: float | None = None
            while True:
                settled = True
                if self.context.is_first and self._pushes is not None:
                    settled = self._pushes.wait(_SLICE_S)
                    if not settled and REQUESTS.reason is not None:
                        grace = grace or time.monotonic() + _GRACE_S
                        if time.monotonic() > grace:
                            self.cut_off(0.0)
                            settled = True
                ACTIVITY.progress()
                if from_first_rank(settled):
                    break
        self.report()

    def cut_off(self, grace: float | None = None) -> None:
        """If a run ends early: wait ``grace`` seconds, or a few by default, then cancel the current upload."""
        pushes = self._pushes
        if pushes is not None and not pushes.wait(_GRACE_S if grace is None else grace):
            pushes.cut_off()
            pushes.wait(_GRACE_S)
            self.report()
            self._pushes = None
            atexit.unregister(self.at_exit)

    def at_exit(self) -> None:
        """Wait at exit for uploads that the caller did not wait for; every upload has a time limit."""
        while self._pushes is not None and not self._pushes.wait(_SLICE_S):
            if REQUESTS.reason is not None:
                self.cut_off()
        self.report()

    # Messages -------------------------------------------------------------------------------------------------------

    def report(self) -> None:
        """Report the uploads that are over since the last call."""
        for outcome in self._pushes.outcomes() if self._pushes is not None else ():
            push, answer = outcome.push, outcome.answer
            record = {"event": "upload", "of": push.label, "step": push.step, "seconds": round(outcome.seconds, 3)}
            if answer.error is None:
                self._failures = 0
                self._sent(push, answer)
                record["commit"] = answer.commits[0]["oid"]
            else:
                record["error"] = answer.error
                if push.last:
                    tell(self._by_hand(push, answer.error))
                else:
                    self._unsent = max(push.step, self._unsent or 0)
                    self._tell_failure(push.label, answer.error)
            if self.context.data.sampler is not None:
                self.context.log_file.write(record)
            with contextlib.suppress(OSError):  # the folder has further uploads
                (self.context.output_dir / STAGING).rmdir()

    def _sent(self, push: Push, answer: Answer) -> None:
        if self.repository is not None and not self.repository.known:
            self.repository = dataclasses.replace(self.repository, name=answer.repo, known=True)
        if push.last:
            tell(f"push_to_hub: uploaded {push.label} to {answer.commits[0]['url']}")

    def _tell_failure(self, label: str, error: str) -> None:
        if error == CUT_OFF:
            tell(f"push_to_hub: the upload of {label} was {error}")
            return
        self._failures += 1
        if self._failures == 1:
            tell(
                f"warning: push_to_hub: could not upload {label} ({error}); training continues, and the next save "
                "tries again"
            )
        elif self._failures == _FAILURES:
            tell(f"warning: push_to_hub: {_FAILURES} consecutive uploads failed ({error}); the next try is at the end")

    def _by_hand(self, push: Push, error: str) -> str:
        """Return commands for uploading manually after the last upload failed."""
        request = push.request
        commands = []
        for part in request["parts"]:
            words = ["hf", "upload", request["repo"], part["folder"], part["path"] or "."]
            words += ["--revision", request["revision"]] if request["revision"] else []
            commands.append(shlex.join(words))
        return (
            f"push_to_hub: the upload of {push.label} to {request['repo']} failed ({error}); training is not "
            f"affected, and {self.context.output_dir} has the model. To upload it, run: {' && '.join(commands)}"
        )
