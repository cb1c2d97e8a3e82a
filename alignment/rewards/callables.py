"""Call user code: run awaitables in one event loop, and report failures in one line with code, rows and ranks."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

from alignment.config.errors import RewardError, show
from alignment.engines.collectives import device, gathered
from alignment.run.ranks import tell, world_size
from alignment.run.retries import NEVER, Retries
from alignment.run.stop import REQUESTS, Cut


def name_of(code: Any) -> str:
    """Return the name of a function, or of the class of any other object."""
    while isinstance(code, functools.partial):
        code = code.func
    return str(getattr(code, "__name__", type(code).__name__))


def together(values: Sequence[Awaitable[Any]]) -> list[Any]:
    """Await all values concurrently and return their results, with exceptions in place of failed results.

    They run in a single event loop per process, in a separate thread: clients that functions keep between steps remain
    usable, and the caller's thread may run its own loop, as notebooks do.
    """

    async def result(value: Awaitable[Any]) -> Any:
        try:
            return await value
        except SystemExit as leaving:
            return leaving  # it would end the loop's thread

    async def results() -> list[Any]:
        return await asyncio.gather(*map(result, values), return_exceptions=True)

    return awaited(results()) if values else []


def awaited(coroutine: Coroutine[Any, Any, Any], look: Callable[[], None] = lambda: None) -> Any:
    """Run a coroutine in that event loop and return its result; call ``look`` every second, which may raise."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _event_loop())
    try:
        while not wait([future], 1.0).done:
            look()
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C: leave nothing running
        raise


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Start the loop in a thread, with this rank's GPU as the current device there and in the loop's own threads."""
    loop, where = asyncio.new_event_loop(), device()

    def choose_device() -> None:
        if where.type == "cuda":
            torch.cuda.set_device(where)

    def run() -> None:
        choose_device()
        loop.run_forever()

    loop.set_default_executor(ThreadPoolExecutor(thread_name_prefix="alignment-rewards", initializer=choose_device))
    threading.Thread(target=run, name="alignment-rewards", daemon=True).start()
    return loop


def span(places: Sequence[str]) -> str:
    """Describe the rows of a batch, which are in any order: the first three, and how many more there are."""
    rows = list(dict.fromkeys(places))
    return "; ".join([*rows[:3], *([f"{len(rows) - 3} more rows"] if len(rows) > 3 else [])])


def as_list(returned: Any, who: str, places: Sequence[str], wanted: str, of: str) -> list[Any]:
    """Convert the sequence, tensor or array that user code returned to a list with one value per row.

    Raises:
        RewardError: it has another type or length; ``who`` should have returned what is ``wanted`` for each ``of``.
    """
    plain = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(plain, Sequence) or isinstance(plain, (str, bytes)):
        raise RewardError(
            f"{who} returned {show(plain)} for {span(places)}; expected a list of {len(places)} {wanted}"
        )
    if len(plain) != len(places):
        raise RewardError(
            f"{who} returned {len(plain)} {wanted} for {len(places)} {of}, {span(places)}; expected one for each"
        )
    return list(plain)


def scalar(value: Any) -> Any:
    """Convert a 0-dim tensor or array, or a NumPy number, to a Python number; return anything else unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def raise_together(failure: RewardError | None, retries: Retries = NEVER) -> None:
    """Raise the same error on every rank if any rank failed, and count the retries of all ranks. Collective.

    Raises:
        RewardError: the error of the first failed rank, with the ranks that failed.
        Cut: instead of RewardError, if the run is stopping: the step is repeated after a resume.
    """
    text = None if failure is None else str(failure)
    own = (text, retries.taken(), REQUESTS.may_cut and REQUESTS.reason is not None)
    everyone = gathered(own) if world_size() > 1 else [own]
    retries.counted([taken for _, taken, _ in everyone])
    ranks = [number for number, (said, _, _) in enumerate(everyone) if said is not None]
    if not ranks:
        return
    message = everyone[ranks[0]][0]
    if world_size() > 1:
        also = f"; also failed: {', '.join(map(str, ranks[1:]))}" if len(ranks) > 1 else ""
        message = f"{message} (on rank {ranks[0]}{also})"
    if any(leaving for _, _, leaving in everyone):
        tell(f"{message}. The run is stopping and repeats this step when it resumes")
        raise Cut
    if failure is not None and world_size() == 1:
        raise failure
    raise RewardError(message) from (None if failure is None else failure.__cause__)
