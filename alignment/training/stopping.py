"""End a run that was asked to stop."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

from alignment.checkpoint.folder import checkpoint_folder
from alignment.checkpoint.writer import CheckpointWriter
from alignment.reporting.progress import say
from alignment.run.activity import ACTIVITY
from alignment.run.protection import launchers
from alignment.run.ranks import NOTICE
from alignment.run.stop import REQUESTS, RunStopped, StopReason
from alignment.training.context import RunContext
from alignment.training.run_page import write_page


def end_run(context: RunContext, writer: CheckpointWriter, finish: Callable[[], None], reason: StopReason) -> NoReturn:
    """End a run whose state has been saved as far as possible; collective. Every rank raises RunStopped.

    ``finish`` flushes pending output, on the first rank.
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
        write_page(context.output_dir)
    detail = f" ({REQUESTS.detail})" if REQUESTS.detail else ""
    message = f"{reason.state} by {reason.name}{detail} after step {step}: {_kept(context, writer)}"
    if not ACTIVITY.guarded:
        say(message)  # a guard prints the message itself
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
    command, call = (
        "run the same command with --resume_from_checkpoint latest",
        "call train(resume_from_checkpoint=True)",
    )
    return f"{name} is complete; {command if ACTIVITY.guarded else call} to resume"


def notice_too_short(save_seconds: float, step_seconds: float) -> str | None:
    """Return a warning if a step and a save may take longer than the time between a request to stop and the kill.

    That is the number of seconds in ``ALIGNMENT_STOP_NOTICE``, which `submit` sets to the notice of its jobs; without
    it, 30 seconds, the default of SLURM's ``KillWait``, torchrun and DeepSpeed.
    """
    given, needed = os.environ.get(NOTICE), save_seconds + step_seconds
    if given is None and not ("SLURM_JOB_ID" in os.environ or launchers()):
        return None
    notice = float(given or 30)
    if needed <= notice:
        return None
    return (
        f"warning: a step and a checkpoint took {needed:.0f} s, but a run that is asked to stop may be killed after "
        f"{notice:.0f} s: it would lose the steps since its last checkpoint. Request a longer notice (#SBATCH "
        f"--signal=USR1@N, torchrun --shutdown-timeout N) and set {NOTICE} to it, or lower save_steps"
    )
