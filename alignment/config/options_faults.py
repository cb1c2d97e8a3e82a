"""The options of faults: bad steps, reads and reward calls that fail, ranks that are silent or hang."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from alignment.config.errors import OptionError, setting
from alignment.config.fields import SaveStrategy, option


@dataclass(kw_only=True)
class FaultOptions:
    """Faults of the numbers and of data; ranks that die or hang."""

    TITLE: ClassVar[str] = "Faults and hangs"

    on_bad_step: str = option(
        "stop",
        "What to do when the loss or the gradient is not finite, or the loss spikes (`loss_spike_factor`): `stop` "
        "(save the weights of the last good step and end the run), `skip` (make no update with this window) or "
        "`rewind` (return to the last checkpoint, and leave the window out when it comes again).",
        choices=("stop", "skip", "rewind"),
    )
    loss_spike_factor: float | None = option(
        None,
        "A loss of more than this many times the running median is a spike, and its step a bad one; unset: never.",
    )
    max_bad_steps: int = option(10, "Bad steps that are skipped or rewound; one more ends the run.")
    rewind_windows: int = option(
        1, "Windows that a rewind leaves out: that of the bad step, and those before it that make up this number."
    )
    retries: int = option(
        3, "How often to repeat a read of data, a reward function or a judge that failed for a reason that may pass."
    )
    retry_pause: float = option(
        5.0, "Seconds before the first retry; before each further one the pause doubles, up to 5 minutes."
    )
    hang_timeout: float = option(
        600.0, "Seconds without progress after which a rank counts as hung, and the run ends; the least of a phase."
    )
    hang_timeout_first: float = option(
        3600.0, "The same while a phase (loading, a rollout, a save …) is passed through for the first time."
    )
    hang_factor: float = option(
        5.0, "A phase may take this many times the longest stretch without progress seen in it, if that is longer."
    )
    peer_timeout: float = option(
        25.0, "Seconds without a sign of life from a rank (killed, stopped, its host or link gone) until the run ends."
    )


def check_faults(options: Any) -> None:
    """Check what is to be done about bad steps.

    Raises:
        OptionError: a factor that most losses would exceed, an option without effect, or no checkpoints to rewind to.
    """
    _check_timing(options)
    factor, action = options.loss_spike_factor, options.on_bad_step
    if factor is not None and not factor > 1:
        raise OptionError(f"{setting('loss_spike_factor', factor)}: must be greater than 1; set 3 or more")
    for name, default, acts in (("max_bad_steps", 10, action != "stop"), ("rewind_windows", 1, action == "rewind")):
        if getattr(options, name) != default and not acts:
            raise OptionError(
                f"{setting(name, getattr(options, name))}: has no effect with {setting('on_bad_step', action)}; leave "
                "it out, or set on_bad_step"
            )
    if action != "rewind":
        return
    for name, unusable in (("save_strategy", SaveStrategy.NO), ("save_only_model", True)):
        if getattr(options, name) == unusable:
            raise OptionError(
                f"on_bad_step='rewind': with {setting(name, unusable)} there is no checkpoint to return to; change "
                "one of them"
            )


def _check_timing(options: Any) -> None:
    first, usual = options.hang_timeout_first, options.hang_timeout
    if first != FaultOptions.hang_timeout_first and first < usual:
        raise OptionError(
            f"{setting('hang_timeout_first', first)}: has no effect below {setting('hang_timeout', usual)}, which "
            "every phase may take; lower that as well"
        )
    if options.retry_pause not in (0, FaultOptions.retry_pause) and not options.retries:
        raise OptionError(f"{setting('retry_pause', options.retry_pause)}: has no effect with retries=0; leave it out")
