"""How long a phase of a run may go without progress, as the options say."""

from __future__ import annotations

from alignment.config.options_faults import FaultOptions
from alignment.reporting.activity import Limits


def limits_of(args: FaultOptions) -> Limits:
    """The limits after which a rank that makes no progress counts as hung, and one that says nothing as lost."""
    return Limits(
        least=args.hang_timeout,
        factor=args.hang_factor,
        first=args.hang_timeout_first,
        silence=args.peer_timeout,
    )
