"""The uploads of a run: what is sent at each save and at the end, and what is said of those that fail.

The first rank uploads; the others only wait with it where training is over. Nothing that goes wrong with an upload
ends a run.
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

from alignment.config.errors import one_line
from alignment.engines.checkpoints.folder import checkpoint_folder
from alignment.engines.collectives import from_first_rank
from alignment.engines.watch.requests import REQUESTS
from alignment.reporting.activity import ACTIVITY
from alignment.reporting.durable import replace_text
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

STAGING = ".hub-upload"  # in the output folder: what is being uploaded, and what could not be
LAST = "last-checkpoint"
_FAILURES = 3  # in a row, after which the end of training is waited for
_GRACE_S = 5.0  # for an upload that is under way when the run is asked to stop
_SLICE_S = 1.0


class Uploads(TrainerCallback):
    """Uploads checkpoints as they are saved, and models as callers ask.

    Args:
        context: the run.
        subject: what its card says.
        call: makes what asks the hub.

    Attributes:
        repository: where to; None until :meth:`use` was called.
        details: what the caller's last card said, which later ones repeat.
        holds: a model that is saved now is not uploaded for that.
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
        self._unsent: int | None = None  # the step of a checkpoint that was skipped, or failed

    def use(self, repository: Repository) -> None:
        """Upload there."""
        self.repository = repository

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within this context a model that is saved is not uploaded."""
        before, self.holds = self.holds, True
        try:
            yield
        finally:
            self.holds = before

    # At each save ---------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing that an attempt before this one left is uploaded."""
        if self.context.is_first and (self._pushes is None or not self._pushes.busy):
            shutil.rmtree(self.context.output_dir / STAGING, ignore_errors=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What has become of uploads is said between steps."""
        self.report()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upload the checkpoint that was saved, as ``hub_strategy`` says."""
        if not self.context.is_first or self.repository is None or args.hub_strategy == "end":
            return
        self.report()
        last = state.global_step >= state.max_steps or control.should_training_stop
        if REQUESTS.reason is not None:  # the run is about to leave
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
        except Exception as error:  # whatever it is, it is no reason to end training
            self._tell_failure(f"step {step}", one_line(error))
            return
        self.context.events("on_push_begin")
        self._add(push)

    def _staged(self, source: Path, message: str, repository: Repository, *, last: bool) -> Push:
        """Model, tokenizer, options and card of a folder, put aside."""
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
        """With the strategies that upload checkpoints, all of it."""
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
        """The card of the model in a folder."""
        return card_text(folder, self._subject(), self.args.to_dict(), self.details)

    def write_card(self, folder: Path) -> None:
        """Write the card into a folder, unless somebody else's is there; on the first rank.

        Raises:
            OSError: it cannot be written.
        """
        if not own_card(folder):
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / CARD, self.card(folder))

    def push(
        self, folder: Path, message: str, token: str | None = None, revision: str | None = None
    ) -> Future[Answer] | None:
        """Begin to upload the model in a folder, after what is under way; on the first rank, None on others.

        Raises:
            OSError: a file cannot be read or put aside.
        """
        if not self.context.is_first:
            return None
        push = self._staged(folder, message, self._where(token, revision), last=True)
        self._unsent = None
        self._add(push)
        return push.future

    def finish(self) -> None:
        """At the end of training, send the newest checkpoint if that was left out, and wait; collective."""
        if self.context.is_first and self._unsent is not None and self.repository is not None:
            if checkpoint_folder(self.context.output_dir, self._unsent).is_dir():
                self._send_checkpoint(self._unsent, last=True)
        self.wait()

    def wait(self) -> None:
        """Wait for all uploads, but not long for any if the run is asked to stop; collective."""
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
        """Where a run ends before its time: wait for so many seconds, or a few, then end what is under way."""
        pushes = self._pushes
        if pushes is not None and not pushes.wait(_GRACE_S if grace is None else grace):
            pushes.cut_off()
            pushes.wait(_GRACE_S)
            self.report()
            self._pushes = None
            atexit.unregister(self.at_exit)

    def at_exit(self) -> None:
        """A process that ends waits for what a caller did not wait for; every upload is bounded."""
        while self._pushes is not None and not self._pushes.wait(_SLICE_S):
            if REQUESTS.reason is not None:
                self.cut_off()
        self.report()

    # What is said ---------------------------------------------------------------------------------------------------

    def report(self) -> None:
        """Say what has become of uploads since the last call."""
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
                    self.context.tell(self._by_hand(push, answer.error))
                else:
                    self._unsent = max(push.step, self._unsent or 0)
                    self._tell_failure(push.label, answer.error)
            if self.context.sampler is not None:
                self.context.log_file.write(record)
            with contextlib.suppress(OSError):  # there is more to upload
                (self.context.output_dir / STAGING).rmdir()

    def _sent(self, push: Push, answer: Answer) -> None:
        if self.repository is not None and not self.repository.known:
            self.repository = dataclasses.replace(self.repository, name=answer.repo, known=True)
        if push.last:
            self.context.tell(f"push_to_hub: {push.label} is at {answer.commits[0]['url']}")

    def _tell_failure(self, label: str, error: str) -> None:
        if error == CUT_OFF:
            self.context.tell(f"push_to_hub: the upload of {label} was {error}")
            return
        self._failures += 1
        if self._failures == 1:
            self.context.tell(
                f"warning: push_to_hub: {label} could not be uploaded ({error}); training goes on, and the next save "
                "tries again"
            )
        elif self._failures == _FAILURES:
            self.context.tell(
                f"warning: push_to_hub: {_FAILURES} uploads in a row failed ({error}); the next try is at the end"
            )

    def _by_hand(self, push: Push, error: str) -> str:
        """What to run in the place of the last upload."""
        request = push.request
        commands = []
        for part in request["parts"]:
            words = ["hf", "upload", request["repo"], part["folder"], part["path"] or "."]
            words += ["--revision", request["revision"]] if request["revision"] else []
            commands.append(shlex.join(words))
        return (
            f"push_to_hub: the upload of {push.label} to {request['repo']} failed ({error}); training is not "
            f"affected, and the model is in {self.context.output_dir}. To upload it, run: {' && '.join(commands)}"
        )
