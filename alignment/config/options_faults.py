"""Options for faults: bad steps, failing reads and reward calls, ranks that die or hang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from alignment.config.fields import Count, Free, Late, Natural, NotNegative, Positive, option


@dataclass(kw_only=True)
class FaultOptions:
    """Faults and hangs."""

    on_bad_step: Late[Free[Literal["stop", "skip"]]] = option(
        "stop", "If loss or gradient is not finite, or the loss spikes: `stop`, with the last good weights, or `skip`."
    )
    loss_spike_factor: Late[Free[Annotated[float, Gt(1)] | None]] = option(
        None, "Treat a step as bad if its loss exceeds this multiple of the running median. Unset: never."
    )
    max_bad_steps: Late[Free[Count]] = option(10, "Maximum number of bad steps to skip; one more ends the run.")
    retries: Free[Natural] = option(3, "Number of retries of a failing read of data, reward call or judge.")
    retry_pause: Free[NotNegative] = option(5.0, "Seconds before the first retry; doubles every time, up to 300.")
    hang_timeout: Late[Free[Positive]] = option(600.0, "Seconds without progress after which a rank counts as hung.")
    hang_timeout_first: Late[Free[Positive]] = option(
        3600.0, "`hang_timeout` for the first time that each phase runs."
    )
    hang_factor: Late[Free[Positive]] = option(5.0, "Extend limits to this multiple of the longest time of a phase.")
    # At least 5: heartbeats come twice a second, unless the GIL or the network delays them.
    peer_timeout: Free[Annotated[float, Ge(5)]] = option(
        25.0, "Seconds without a heartbeat from a rank to end the run."
    )
