"""The uploads of a run: what is sent at each save, on request and at the end, and how failures are reported.

The first rank uploads, in a daemon thread. Ranks wait for it only when training is over, and for a bounded time. A
failed upload never ends a run.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from huggingface_hub import CommitInfo
from huggingface_hub.utils import disable_progress_bars
from transformers import TrainerCallback

from alignment.checkpoint.folder import checkpoint_folder
from alignment.checkpoint.manifest import MANIFEST, Manifest
from alignment.config.errors import HubError, one_line
from alignment.engines.collectives import from_first_rank, on_first_rank
from alignment.internals.process_end import before_threads_end, leave_daemon_pools
from alignment.reporting.durable import replace_text
from alignment.run.activity import ACTIVITY
from alignment.run.ranks import tell
from alignment.run.retries import Retries
from alignment.run.stop import REQUESTS
from alignment.training.context import RunContext
from alignment.training.hub import contents
from alignment.training.hub.contents import CARD, Subject, own_card, stage
from alignment.training.hub.repository import Repository, prepared_repository

STAGING = ".hub-upload"  # in the output folder: files being uploaded, and those of failed uploads
_MODEL = "model"
_LEAST_S, _SLOWEST = 600.0, 1e6  # wait for an upload: minimum seconds, and lowest expected bytes per second
_GRACE_S, _SLICE_S = 5.0, 1.0  # wait if the run is asked to stop, and between two looks at that
Upload: TypeAlias = "Future[CommitInfo]"


@dataclass
class Push:
    """An upload of staged files, ``size`` bytes. The ``last`` one, or a caller's, is retried, and kept if it fails."""

    label: str
    step: int
    repository: Repository
    folder: Path
    parts: dict[str, str]  # message of the commit by the name of a folder in ``folder``
    last: bool
    size: int = 0
    seconds: float = 0.0
    future: Upload = field(default_factory=Future)


class Uploads(TrainerCallback):
    """Uploads checkpoints as they are saved, and models on request.

    ``subject`` describes the model for its card, to which ``details`` of a caller are added. ``save_model`` writes the
    model to the output folder. ``repository`` is None until it is known.
    """

    def __init__(self, context: RunContext, subject: Callable[[], Subject], save_model: Callable[[], None]) -> None:
        self.context, self.args, self.root = context, context.args, context.output_dir
        self._subject, self.save_model = subject, save_model
        self.repository: Repository | None = None
        self.details: dict[str, Any] = {}
        self._open: list[Push] = []  # not yet reported, oldest first
        self._count, self._warned = 0, False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the staged files of an earlier attempt."""
        if self.context.is_first and not self._open:
            shutil.rmtree(self.root / STAGING, ignore_errors=True)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upload the saved checkpoint according to ``hub_strategy``, unless the run is about to stop."""
        to = self.repository if self.context.is_first else None
        if to is None or args.hub_strategy == "end" or REQUESTS.reason is not None:
            return
        self._report()
        last = state.global_step >= state.max_steps or control.should_training_stop
        if self._open and not last and not args.hub_always_push:
            return
        source = checkpoint_folder(self.root, state.global_step)
        named = f"epoch {int(state.epoch or 0)}" if args.save_strategy == "epoch" else f"step {state.global_step}"
        path = {"checkpoint": "last-checkpoint", "all_checkpoints": source.name}.get(args.hub_strategy)
        try:
            self._begin(source, f"Training in progress, {named}", to, last, path)
        except Exception as error:  # no error here may end training
            self._warn(source.name, one_line(error))

    def _begin(self, source: Path, message: str, to: Repository, last: bool, state: str | None = None) -> None:
        """Stage model, tokenizer, options and card of a folder, and a checkpoint's files in ``state``; upload them."""
        step = self.context.state.global_step
        folder = self.root / STAGING / f"{step}-{self._count}"
        model = folder / _MODEL
        push = Push(source.name, step, to, folder, {_MODEL: message}, last)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            model.mkdir(parents=True)
            push.size = stage(source, contents.model_files(source, self.context.processing_class), model)
            replace_text(model / "options.json", contents.published_options(self.args.to_dict()))
            if own_card(self.root):
                stage(self.root, [CARD], model)
            else:
                self._write_card(source, model)
            if state is not None:  # after the model, whose weights are then not sent again
                push.parts[state] = f"{message}, checkpoint"
                push.size += stage(source, [*Manifest.read(source).files, MANIFEST], folder / state)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise HubError(f"could not stage {source.name} for its upload: {one_line(error)}") from error
        if self._count == 0:
            before_threads_end(self._at_exit)
        self._count += 1
        self.context.events("on_push_begin")
        push.future.set_running_or_notify_cancel()  # it cannot be cancelled
        before = [each.future for each in self._open]  # one upload at a time
        self._open.append(push)
        threading.Thread(target=self._work, args=(push, before), name="hub upload", daemon=True).start()

    def _work(self, push: Push, before: list[Upload]) -> None:
        disable_progress_bars()  # they would be drawn into that of training
        wait_for(before)
        began = time.monotonic()
        if push.future.done():  # given up
            return
        retries = Retries(self.args.retries if push.last else 0, self.args.retry_pause)
        with contextlib.suppress(InvalidStateError):  # given up meanwhile
            try:
                info = retries(f"upload of {push.label}", lambda: self._uploaded(push))
                shutil.rmtree(push.folder, ignore_errors=True)
                push.seconds = time.monotonic() - began
                push.future.set_result(info)
            except Exception as error:
                push.seconds = time.monotonic() - began
                push.future.set_exception(error)

    def _uploaded(self, push: Push) -> CommitInfo:
        try:
            to = push.repository = push.repository if push.repository.known else push.repository.ready()
            commits = [
                to.api.upload_folder(
                    repo_id=to.name,
                    folder_path=push.folder / name,
                    path_in_repo=None if name == _MODEL else name,
                    commit_message=message,
                    revision=to.revision,
                    # Files that are not replaced: of other weights, or of another number of ranks.
                    delete_patterns=[*contents.WEIGHTS] if name == _MODEL else ["*"],
                )
                for name, message in push.parts.items()
            ]
        except Exception as error:  # each library used has its own error classes
            raise HubError(push.repository.failure(error)) from error
        return commits[0]

    def write_card(self, **details: Any) -> None:
        """Write the card to the output folder, unless someone else's is there; collective."""
        self.details |= {name: value for name, value in details.items() if value is not None}
        on_first_rank(lambda: None if own_card(self.root) else self._write_card(self.root, self.root))

    def _write_card(self, source: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / CARD, contents.card_text(source, self._subject(), self.args.to_dict(), self.details))

    def destination(self, *given: Any) -> Repository:
        """Return the repository of the run, checked; collective.

        ``given`` are arguments of :func:`prepared_repository`, for another one.
        """
        if self.repository is not None and not any(given):
            return self.repository
        to = prepared_repository(self.args, self.context.retries, *given)
        self.repository = self.repository or to
        return to

    def push(self, folder: Path, message: str, to: Repository | None = None) -> Upload | None:
        """Begin the upload of the model in a folder; return its future on the first rank, None on others. Collective.

        Raises:
            HubError: if a file cannot be read or staged.
        """
        to = to or self.destination()
        on_first_rank(lambda: self._begin(folder, message, to, last=True))
        return self._open[-1].future if self._open else None

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Wait for uploads after the body, or only a few seconds if it fails; collective."""
        try:
            yield
        except BaseException:
            self._settle(_GRACE_S)
            raise
        self.wait()

    def wait(self, future: Upload | None = None) -> CommitInfo | None:
        """Wait for all uploads, and return the commit of ``future`` on the rank that has one; collective.

        Raises:
            HubError: on every rank, if that upload failed.
        """
        with ACTIVITY("upload"):
            self._settle(together=from_first_rank)
        failed = from_first_rank(future and future.exception())
        if failed is not None:
            raise HubError(f"push_to_hub: {failed}")
        return None if future is None else future.result()

    def _settle(self, seconds: float | None = None, together: Callable[[bool], bool] = bool) -> None:
        """Wait for all uploads, only briefly if the run is asked to stop; give up those that have not ended then."""
        bound = sum(_LEAST_S + push.size / _SLOWEST for push in self._open) if seconds is None else seconds
        start = time.monotonic()
        end, uploads = start + bound, [push.future for push in self._open]
        while together(bool(wait_for(uploads, _SLICE_S).not_done) and time.monotonic() < end):
            ACTIVITY.progress()
            if REQUESTS.reason is not None:
                end = min(end, time.monotonic() + _GRACE_S)
        for upload in reversed(uploads):  # the oldest last, since the others wait for it
            with contextlib.suppress(InvalidStateError):  # it has ended
                why = f"given up after {time.monotonic() - start:.0f} s, because the run is ending"
                upload.set_exception(HubError(why))
        self._report()

    def _at_exit(self) -> None:
        self._settle()
        leave_daemon_pools()

    def _report(self) -> None:
        """Report the uploads that are over since the last call."""
        while self._open and self._open[0].future.done():
            push = self._open.pop(0)
            record = {"event": "upload", "of": push.label, "step": push.step, "seconds": round(push.seconds, 3)}
            if (error := push.future.exception()) is None:
                info, self._warned = push.future.result(), False
                record["commit"] = info.oid
                if push.last:
                    tell(f"push_to_hub: uploaded {push.label} to {info.commit_url}")
            else:
                record["error"] = str(error)
                self._failed(push, str(error))
            if self.context.data.sampler is not None:
                self.context.log_file.write(record)
            with contextlib.suppress(OSError):  # the folder has further uploads
                (self.root / STAGING).rmdir()

    def _failed(self, push: Push, error: str) -> None:
        if not push.last:
            shutil.rmtree(push.folder, ignore_errors=True)
            return self._warn(push.label, error)
        to = push.repository
        branch = ["--revision", to.revision] if to.revision else []
        paths = {str(push.folder / name): "." if name == _MODEL else name for name in push.parts}
        commands = [shlex.join(["hf", "upload", to.name, *both, *branch]) for both in paths.items()]
        tell(
            f"push_to_hub: the upload of {push.label} to {to.name} failed ({error}); training is not affected, "
            f"and {self.root} has the model. To upload it, run: {' && '.join(commands)}"
        )

    def _warn(self, label: str, error: str) -> None:
        """Report the first of consecutive failures."""
        if not self._warned:
            tell(f"warning: push_to_hub: could not upload {label} ({error}); the next save tries again")
        self._warned = True
