"""Options for faults: bad steps, failing reads and reward calls, ranks that die or hang."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from alignment.config.errors import OptionError, setting
from alignment.config.fields import option


@dataclass(kw_only=True)
class FaultOptions:
    """Non-finite losses, failing reads, ranks that die or hang."""

    TITLE: ClassVar[str] = "Faults and hangs"

    on_bad_step: str = option(
        "stop",
        "What to do if the loss or the gradient is not finite, or the loss spikes (`loss_spike_factor`): `stop` "
        "(save the weights of the last good step and end the run) or `skip` (skip the update of this window).",
        choices=("stop", "skip"),
    )
    loss_spike_factor: float | None = option(
        None,
        "Treat a step as bad if its loss exceeds this multiple of the running median. If unset, loss spikes are not "
        "detected.",
    )
    max_bad_steps: int = option(10, "Maximum number of bad steps to skip; one more ends the run.")
    retries: int = option(
        3, "Number of retries after a temporary failure to read data or to call a reward function or judge."
    )
    retry_pause: float = option(
        5.0, "Seconds to wait before the first retry. The pause doubles with every further retry, up to 5 minutes."
    )
    hang_timeout: float = option(
        600.0, "Seconds without progress after which a rank is considered hung and the run ends; see `hang_factor`."
    )
    hang_timeout_first: float = option(
        3600.0, "`hang_timeout` for the first time that each phase (loading, rollout, save and others) runs."
    )
    hang_factor: float = option(
        5.0,
        "Extend `hang_timeout` in a phase to this multiple of the longest time without progress observed in it, if "
        "that is longer.",
    )
    peer_timeout: float = option(
        25.0,
        "Seconds without a heartbeat from a rank (killed, stopped, host or network down) after which the run ends.",
    )


def check_faults(options: Any) -> None:
    """Check the options for bad steps, retries and hangs.

    Raises:
        OptionError: a factor that most losses would exceed, or an option without effect.
    """
    _check_timing(options)
    factor, action = options.loss_spike_factor, options.on_bad_step
    if factor is not None and not factor > 1:
        raise OptionError(f"{setting('loss_spike_factor', factor)}: must be greater than 1; set 3 or more")
    if options.max_bad_steps != FaultOptions.max_bad_steps and action == "stop":
        raise OptionError(
            f"{setting('max_bad_steps', options.max_bad_steps)}: has no effect with {setting('on_bad_step', action)}; "
            "remove it, or set on_bad_step: skip"
        )


def _check_timing(options: Any) -> None:
    first, usual = options.hang_timeout_first, options.hang_timeout
    if first != FaultOptions.hang_timeout_first and first < usual:
        raise OptionError(
            f"{setting('hang_timeout_first', first)}: must be at least {setting('hang_timeout', usual)}, which "
            "applies to every phase; lower hang_timeout as well"
        )
    if options.retry_pause not in (0, FaultOptions.retry_pause) and not options.retries:
        raise OptionError(f"{setting('retry_pause', options.retry_pause)}: has no effect with retries=0; remove it")
