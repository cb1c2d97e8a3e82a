"""Time limits for progress of a run, from its options."""

from __future__ import annotations

from alignment.config.options_faults import FaultOptions
from alignment.run.activity import Limits


def limits_of(args: FaultOptions) -> Limits:
    """Return the limits after which a rank without progress is reported as hung, and a silent rank as lost."""
    return Limits(
        least=args.hang_timeout,
        factor=args.hang_factor,
        first=args.hang_timeout_first,
        silence=args.peer_timeout,
    )
