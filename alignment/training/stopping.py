"""End a run that was asked to stop, and listen for signals where no command's guard does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from alignment.checkpoint.folder import checkpoint_folder
from alignment.checkpoint.writer import CheckpointWriter
from alignment.run.activity import ACTIVITY
from alignment.run.requests import REQUESTS
from alignment.run.signals import SignalWatch
from alignment.run.stop import RunStopped, StopReason
from alignment.training.context import RunContext
from alignment.training.run_page import write_page


@contextlib.contextmanager
def listening(tell: Callable[[str], None]) -> Iterator[None]:
    """Within this context, SIGTERM, SIGHUP and SIGUSR1 request a stop, unless they have other handlers.

    For scripts that call ``train()``; commands have a guard that always listens. Ctrl-C keeps Python's behavior.
    Signals can only be handled in the main thread; elsewhere, the file ``STOP`` stops a run.

    Args:
        tell: prints a line on the first rank.
    """
    if ACTIVITY.guarded:
        yield
        return
    ours = [
        each for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) if signal.getsignal(each) == signal.SIG_DFL
    ]
    watch = SignalWatch(REQUESTS, lambda reason: None, tell=tell)
    in_main = threading.current_thread() is threading.main_thread()
    try:
        with watch.listening(ours) if in_main else contextlib.nullcontext():
            yield
    finally:
        REQUESTS.forget()


def end_run(context: RunContext, writer: CheckpointWriter, finish: Callable[[], None], reason: StopReason) -> NoReturn:
    """End a run whose state has been saved as far as possible; collective.

    Args:
        context: the run.
        writer: the writer of its checkpoints.
        finish: flushes pending output, on the first rank.
        reason: the request to stop.

    Raises:
        RunStopped: on every rank.
    """
    REQUESTS.done = True
    step = context.state.global_step
    stop = {"event": "stop", "signal": reason.name, "step": step, "checkpoint": writer.newest}
    stop["phases"] = context.phases.summary()
    for write in (lambda: context.log_file.write(stop), context.log_file.finish, finish):
        writer.finish(write)
    context.events("on_train_end")
    if ACTIVITY.status is not None:
        ACTIVITY.status.update(state=reason.state, signal=reason.name, step=step)
    if context.is_first:
        write_page(context.output_dir, context.tell)
    detail = f" ({REQUESTS.detail})" if REQUESTS.detail else ""
    message = f"{reason.state} by {reason.name}{detail} after step {step}: {_kept(context, writer)}"
    if not ACTIVITY.guarded:
        context.tell(f"\n{message}")  # a progress bar may occupy the line; a guard prints the message itself
    raise RunStopped(reason, message)


def _kept(context: RunContext, writer: CheckpointWriter) -> str:
    """Describe for the user what a resume will find."""
    args, step = context.args, context.state.global_step
    name = checkpoint_folder(context.output_dir, step).name
    if step == 0:
        return "no step was completed, so there is nothing to save"
    if args.save_strategy == "no":
        return "nothing was saved, because save_strategy is no"
    if writer.newest != step:
        return f"{name} could not be written ({writer.failure}); the run can only be resumed from an earlier one"
    if args.save_only_model:
        return f"{name} contains only the model (save_only_model), so the run cannot be resumed from it"
    again = "run the same command with --resume_from_checkpoint latest"
    if not ACTIVITY.guarded:
        again = "call train(resume_from_checkpoint=True)"
    return f"{name} is complete; {again} to resume"
