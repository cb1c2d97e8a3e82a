"""Rewards by a user's Python functions, called by keyword with what their signatures ask for."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
import numbers
from collections.abc import Callable, Collection, Sequence
from typing import Any

from transformers import TrainerState

from alignment.config.errors import Leaving, OptionError, RewardError, listing, show
from alignment.config.lookup import FAILURES, raised
from alignment.engines.rng import as_before
from alignment.engines.watch.retries import NEVER, Retries, is_transient
from alignment.rewards.callables import as_list, name_of, scalar, span, together
from alignment.rewards.samples import Samples

# What every function may ask for, besides the dataset's further columns.
ARGUMENTS = ("prompts", "completions", "completion_ids")
STATE = "trainer_state"  # and of the run: transformers' TrainerState
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class FunctionReward:
    """A reward source made of a callable, which may be a coroutine function or return an awaitable.

    It is called with ``prompts``, ``completions``, ``completion_ids`` and the dataset's further columns, each a list
    with one value per sample, and with ``trainer_state``, a copy of the run's ``TrainerState``: those that it has a
    parameter for, or all if it takes ``**kwargs``. It returns as many
    numbers (booleans count as 1 and 0), None where it has nothing to say. It has copies: it may change them.

    Args:
        function: the callable.
        name: for messages and metrics; the function's own if None.

    Attributes:
        state: of the run, once there is one.

    Raises:
        OptionError: it cannot be called by keyword.
    """

    truncated = 0

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        self.function, self.name = function, name or name_of(function)
        self.state = TrainerState()
        self.who = f"reward function {self.name!r}"
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"{self.who} tells nothing of its arguments ({error}); wrap it in a function that takes "
                f"{', '.join(ARGUMENTS)} and the columns that it needs"
            ) from error
        self._takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        self._taken = {parameter.name for parameter in parameters if parameter.kind in _BY_KEYWORD}
        self._required = [
            parameter.name
            for parameter in parameters
            if parameter.default is inspect.Parameter.empty and parameter.kind in _BY_KEYWORD
        ]
        for parameter in parameters:
            nameless = parameter.kind is inspect.Parameter.POSITIONAL_ONLY
            if nameless and parameter.default is inspect.Parameter.empty:
                raise OptionError(f"{self.who} takes {parameter.name!r} by position only; arguments come by keyword")

    def check(self, columns: Collection[str], where: str | None = None) -> None:
        """Whether the function can be called with rows that have these further columns.

        Args:
            columns: their names.
            where: names the rows in messages; None where there is but one dataset.

        Raises:
            OptionError: it needs an argument that there is not, or a column has the name of one that there is anyway.
        """
        where = where or "the dataset"
        for name in self._required:
            if name not in (*ARGUMENTS, STATE) and name not in columns:
                raise OptionError(
                    f"{self.who} needs {name!r}, which {where} does not have as a column (further columns "
                    f"that JSON can hold: {listing(sorted(columns))}); add the column, or give the argument a default"
                )
        for name in (*ARGUMENTS, STATE):
            if name in columns and (self._takes_all or name in self._taken):
                raise OptionError(
                    f"{self.who} takes {name!r}, which is what training hands to it and also a column of {where}; "
                    "rename the column"
                )

    def call(self, samples: Samples) -> Any:
        """What the function returns, as it is: a result or an awaitable one."""
        given = {name: getattr(samples, name) for name in ARGUMENTS} | samples.columns | {STATE: self.state}
        taken = {name: values for name, values in given.items() if self._takes_all or name in self._taken}
        # Copies to the ground: a function that cuts an id off its list must not cut what is trained on.
        return self.function(**copy.deepcopy(taken))

    def scores(self, returned: Any, samples: Samples) -> list[float | None]:
        """What the function returned, checked.

        Raises:
            RewardError: an exception in place of a result, or anything that is not a score for each sample.
        """
        if isinstance(returned, BaseException):
            raise RewardError(
                f"{self.who} raised {raised(returned)} while scoring {span(samples.places)}; correct it, or let it "
                "return None for what it cannot score"
            ) from returned
        values = as_list(returned, self.who, samples.places, "scores", "samples")
        return [self._score(value, place) for value, place in zip(values, samples.places)]

    def _score(self, value: Any, place: str) -> float | None:
        value = scalar(value)
        if value is None:
            return None
        if not isinstance(value, numbers.Real):
            raise RewardError(f"{self.who} returned {show(value)} for {place}; return a number, or None for no score")
        try:
            number = float(value)
        except OverflowError:  # an integer of more than 308 digits
            number = math.inf
        if not math.isfinite(number):
            raise RewardError(
                f"{self.who} returned {number} for {place}; return a finite number, or None for no score"
            )
        return number

    def score(self, samples: Samples) -> list[float | None]:
        """A score per sample; None where the function has nothing to say. Without samples it is not called.

        Raises:
            RewardError: as ``score_all``.
        """
        return score_all([self], samples)[0]

    def close(self) -> None:
        """Nothing is held."""


def score_all(
    functions: Sequence[FunctionReward], samples: Samples, retries: Retries = NEVER
) -> list[list[float | None]]:
    """The scores of every function. Those that return awaitables are awaited together, after all were called.

    A function that raised an error which may pass, such as a timeout, is called again, with the same random streams;
    of several awaitables, those that failed are awaited together again.

    Raises:
        RewardError: a function raised or returned what are no scores; the first of them is named, with its rows.
    """
    if not len(samples):
        return [[] for _ in functions]
    returned = [_called(function, samples, retries) for function in functions]
    waiting = [index for index, value in enumerate(returned) if inspect.isawaitable(value)]
    for number in itertools.count(1):
        for index, value in zip(waiting, together([returned[index] for index in waiting])):
            returned[index] = value
        failed = {i: returned[i] for i in waiting if isinstance(returned[i], Exception) and is_transient(returned[i])}
        waiting = [i for i, error in failed.items() if retries.again(functions[i].who, error, number)]
        if not waiting:
            break
        for index in waiting:
            returned[index] = _called(functions[index], samples, retries)
        waiting = [index for index in waiting if inspect.isawaitable(returned[index])]
    return [function.scores(value, samples) for function, value in zip(functions, returned)]


def _called(function: FunctionReward, samples: Samples, retries: Retries) -> Any:
    try:
        return retries(function.who, as_before(functools.partial(function.call, samples)))
    except Leaving:
        raise
    except FAILURES as error:  # reported once the others are awaited: none may be left behind
        return error
