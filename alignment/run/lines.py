"""Messages about ranks that are silent, were killed or hang: which rank, where, in which phase and step."""

from __future__ import annotations

from alignment.run.beats import Beat

_SILENT = "the process is suspended, or its host or network is down (peer_timeout)"
_MEMORY = "the host may have run out of memory"


def hung_line(rank: int, beat: Beat, world_size: int) -> str:
    """Message about a rank that makes no progress."""
    who = f"rank {rank} (host {beat.host})" if world_size > 1 else f"this process (host {beat.host})"
    return (
        f"error: {who} has made no progress for {beat.idle:.0f} s in {beat.place} (hang_timeout, hang_timeout_first); "
        f"its stack traces are in hang-{rank}.txt"
    )


def silent_line(rank: int, beat: Beat | None, seconds: float) -> str:
    """Message about a rank that does not send heartbeats.

    Args:
        rank: the silent rank.
        beat: its last heartbeat, if any.
        seconds: seconds without a heartbeat.
    """
    if beat is None:
        return f"error: rank {rank} has sent no heartbeat since the ranks joined: {_SILENT}"
    return (
        f"error: rank {rank} (host {beat.host}) has sent no heartbeat for {seconds:g} s, last seen in {beat.place}: "
        f"{_SILENT}"
    )


def killed_line(rank: int, beat: Beat | None) -> str:
    """Message about a rank whose process ended without reporting an error."""
    who = f"rank {rank}" if beat is None else f"rank {rank} (host {beat.host}, process {beat.pid})"
    where = "" if beat is None else f" in {beat.place}"
    return f"error: {who} was killed{where}; {_MEMORY}"


def lost_line(rank: int, beat: Beat) -> str:
    """Message about a rank of another machine whose connection broke."""
    return (
        f"error: rank {rank} (host {beat.host}, process {beat.pid}) was killed or disconnected in {beat.place}; "
        f"if it was killed, {_MEMORY}"
    )


def silent_store_line(rank: int, host: str, first: Beat | None, seconds: float, *, by_launcher: bool) -> str:
    """Message about the process that serves the store and does not respond.

    Args:
        rank, host: the rank that reports it.
        first: the last heartbeat of rank 0, if any.
        seconds: seconds without a response.
        by_launcher: whether a launcher serves the store instead of rank 0.
    """
    what, place = "the launcher", ""
    if not by_launcher:
        what = f"rank 0{f' (host {first.host})' if first is not None else ''}"
        place = f", last seen in {first.place}" if first is not None else ""
    return (
        f"error: rank {rank} (host {host}): {what}, which coordinates the ranks, has not responded for "
        f"{seconds:g} s{place}: {_SILENT}"
    )
