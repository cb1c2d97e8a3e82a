"""What is said of ranks that are silent, were killed or hang: who, where, in which phase and step."""

from __future__ import annotations

from alignment.engines.watch.beats import Beat

_SILENT = "it was stopped, or its host or the network is down (peer_timeout)"
_MEMORY = "perhaps for lack of host memory"


def hung_line(rank: int, beat: Beat, world_size: int) -> str:
    """Of a rank that makes no progress."""
    who = f"rank {rank} (host {beat.host})" if world_size > 1 else f"this process (host {beat.host})"
    return (
        f"error: {who} has made no progress for {beat.idle:.0f} s in {beat.place} (hang_timeout, hang_timeout_first); "
        f"its stacks are in hang-{rank}.txt"
    )


def silent_line(rank: int, beat: Beat | None, seconds: float) -> str:
    """Of a rank that has sent no beat for so long.

    Args:
        rank: that one.
        beat: its last one; None if there was none.
        seconds: of silence.
    """
    if beat is None:
        return f"error: rank {rank} has given no sign of life since the ranks have joined: {_SILENT}"
    return (
        f"error: rank {rank} (host {beat.host}) has given no sign of life for {seconds:g} s, last in {beat.place}: "
        f"{_SILENT}"
    )


def killed_line(rank: int, beat: Beat | None) -> str:
    """Of a rank whose process has ended without a word."""
    who = f"rank {rank}" if beat is None else f"rank {rank} (host {beat.host}, process {beat.pid})"
    where = "" if beat is None else f" in {beat.place}"
    return f"error: {who} was killed{where}, {_MEMORY}"


def lost_line(rank: int, beat: Beat) -> str:
    """Of a rank of another machine to which the connection broke."""
    return (
        f"error: rank {rank} (host {beat.host}, process {beat.pid}) was killed or lost its network in {beat.place}; "
        f"if it was killed, {_MEMORY}"
    )


def silent_store_line(rank: int, host: str, first: Beat | None, seconds: float, *, by_launcher: bool) -> str:
    """Of whoever serves the store and does not answer.

    Args:
        rank, host: of the rank that says so.
        first: the last beat of rank 0, if there was one.
        seconds: of silence.
        by_launcher: a launcher serves it, and not rank 0.
    """
    what, place = "the launcher", ""
    if not by_launcher:
        what = f"rank 0{f' (host {first.host})' if first is not None else ''}"
        place = f", last in {first.place}" if first is not None else ""
    return (
        f"error: rank {rank} (host {host}): {what}, which keeps the ranks in touch, has given no answer for "
        f"{seconds:g} s{place}: {_SILENT}"
    )
