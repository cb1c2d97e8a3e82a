"""The options of faults: what a run does when a rank is silent or hangs."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alignment.config.fields import option


@dataclass(kw_only=True)
class FaultOptions:
    """Ranks that die or hang."""

    TITLE: ClassVar[str] = "Faults and hangs"

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
