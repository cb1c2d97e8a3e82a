"""Calls of a user's code: awaitables in one event loop, and failures in one line that names code, rows and ranks."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Sequence
from typing import Any

from alignment.config.errors import RewardError, show
from alignment.engines.collectives import gathered
from alignment.engines.launch_env import rank, world_size
from alignment.engines.watch.requests import REQUESTS
from alignment.engines.watch.retries import NEVER, Retries
from alignment.engines.watch.stop import Cut


def name_of(code: Any) -> str:
    """The name of a function, or of the class of any other object."""
    while isinstance(code, functools.partial):
        code = code.func
    return str(getattr(code, "__name__", type(code).__name__))


def together(values: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await all values at once and return their results, an exception in place of the result of one that raised.

    They run in the one event loop of this process, which has a thread of its own: clients that functions keep from
    one step to the next stay usable, and the caller's thread may run a loop itself, as notebooks do.
    """

    async def result(value: Awaitable[Any]) -> Any:
        try:
            return await value
        except SystemExit as leaving:
            return leaving  # it would end the loop's thread, and with it every later answer

    async def results() -> list[Any]:
        return await asyncio.gather(*map(result, values), return_exceptions=True)

    if not values:
        return []
    future = asyncio.run_coroutine_threadsafe(results(), _event_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C: nothing may run on behind the caller's back
        raise


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="alignment-rewards", daemon=True).start()
    return loop


def span(places: Sequence[str]) -> str:
    """The rows of a batch by its first and last."""
    return places[0] if places[0] == places[-1] else f"{places[0]} to {places[-1]}"


def as_list(returned: Any, who: str, places: Sequence[str], wanted: str, of: str) -> list[Any]:
    """What a user's code returned, as a list with one value for each place.

    Args:
        returned: a list, tuple or other sequence, or a one-dimensional tensor or array.
        who: the code, for messages.
        places: names of the rows that it was called with.
        wanted: what it should return, in the plural.
        of: what it was called with, in the plural.

    Raises:
        RewardError: it is none of these, or of another length.
    """
    plain = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(plain, Sequence) or isinstance(plain, (str, bytes)):
        raise RewardError(f"{who} returned {show(plain)} for {span(places)}; return a list of {len(places)} {wanted}")
    if len(plain) != len(places):
        raise RewardError(
            f"{who} returned {len(plain)} {wanted} for {len(places)} {of}, {span(places)}; return one for each"
        )
    return list(plain)


def scalar(value: Any) -> Any:
    """A tensor or array of no dimension, or a NumPy number, as Python's number; anything else as it is."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def raise_together(failure: RewardError | None, retries: Retries = NEVER) -> None:
    """Raise one error on every rank if there is a failure on any. Collective.

    Args:
        failure: this rank's.
        retries: of the calls; what was repeated on any rank is counted on every one.

    Raises:
        RewardError: what failed on the first rank that failed, and on which ranks something did.
        Cut: the same while a training run that was asked to stop ends: a resume does it again.
    """
    text = None if failure is None else str(failure)
    own = (text, retries.taken(), REQUESTS.deferring and REQUESTS.reason is not None)
    everyone = gathered(own) if world_size() > 1 else [own]
    retries.counted([taken for _, taken, _ in everyone])
    ranks = [number for number, (said, _, _) in enumerate(everyone) if said is not None]
    if not ranks:
        return
    message = everyone[ranks[0]][0]
    if world_size() > 1:
        also = f"; failed as well: {', '.join(map(str, ranks[1:]))}" if len(ranks) > 1 else ""
        message = f"{message} (on rank {ranks[0]}{also})"
    if any(leaving for _, _, leaving in everyone):
        if rank() == 0:
            print(f"{message}. The run was asked to stop and repeats this step when it resumes", flush=True)
        raise Cut
    if failure is not None and world_size() == 1:
        raise failure
    raise RewardError(message) from (None if failure is None else failure.__cause__)
