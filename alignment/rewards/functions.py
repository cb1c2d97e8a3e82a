"""Reward functions: user-defined Python functions, called with the keyword arguments in their signatures."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import numbers
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from transformers import TrainerState

from alignment.config.errors import Leaving, OptionError, RewardError, listing, show
from alignment.config.lookup import FAILURES, raised
from alignment.engines.rng import as_before
from alignment.rewards.callables import as_list, name_of, scalar, span, together
from alignment.rewards.samples import Samples
from alignment.run.retries import NEVER, Retries, is_transient

# The arguments available to every function, in addition to the dataset's other columns.
ARGUMENTS = ("prompts", "completions", "completion_ids")
STATE = "trainer_state"  # the run's TrainerState of transformers
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class FunctionReward:
    """A reward source that calls a function, which may be a coroutine function or return an awaitable.

    The available arguments are ``prompts``, ``completions``, ``completion_ids`` and the dataset's other columns, each
    a list with one value per sample, and ``trainer_state``, a copy of the run's ``TrainerState``. The function gets
    those that its signature names, or all of them if it takes ``**kwargs``. It returns one number per sample (booleans
    count as 1 and 0), or None for no score. It gets copies, which it may modify.

    Args:
        function: the callable.

    Raises:
        OptionError: the function cannot be called with keyword arguments.
    """

    truncated = 0

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.name = function, name_of(function)
        self.state = TrainerState()  # of the run
        self.who = f"reward function {self.name!r}"
        try:
            self.signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise OptionError(f"{self.who} has no readable signature ({error}); wrap it in a function") from error
        kinds = {name: parameter.kind for name, parameter in self.signature.parameters.items()}
        self._takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
        self._taken = {name for name, kind in kinds.items() if kind in _BY_KEYWORD}

    def check(self, columns: Collection[str], where: str = "the dataset") -> None:
        """Check that the function can be called with the additional columns of a dataset.

        Raises:
            OptionError: a required argument is missing, or a column has the name of a built-in argument.
        """
        for name in (*ARGUMENTS, STATE):
            if name in columns and (self._takes_all or name in self._taken):
                raise OptionError(
                    f"{self.who} takes {name!r}, which is both a built-in argument and a column of {where}; rename "
                    "the column"
                )
        names = [*ARGUMENTS, STATE, *columns]
        try:
            self.signature.bind(**dict.fromkeys(name for name in names if self._takes_all or name in self._taken))
        except TypeError as error:
            raise OptionError(
                f"{self.who}: {error}, and {where} has no such column (available by keyword: {listing(names)}); add "
                "the column, or give the argument a default"
            ) from error

    def call(self, samples: Samples) -> Any:
        """Call the function and return its result, which may be awaitable."""
        given = {name: getattr(samples, name) for name in ARGUMENTS} | samples.columns
        # Copies: a function that modifies its arguments must not modify the training data or the run.
        taken = copy.deepcopy({n: values for n, values in given.items() if self._takes_all or n in self._taken})
        if self._takes_all or STATE in self._taken:  # without a deep copy of a long log, whose records are plain
            taken[STATE] = copy.copy(self.state)
            taken[STATE].log_history = [dict(record) for record in self.state.log_history]
        return self.function(**taken)

    def scores(self, returned: Any, samples: Samples) -> list[float | None]:
        """Validate the function's result.

        Raises:
            RewardError: the result is an exception, or not one score per sample.
        """
        if isinstance(returned, BaseException):
            raise RewardError(
                f"{self.who} raised {raised(returned)} while scoring {span(samples.places)}; fix the function, or "
                "return None for samples that it cannot score"
            ) from returned
        values = as_list(returned, self.who, samples.places, "scores", "samples")
        return [self._score(value, place) for value, place in zip(values, samples.places)]

    def _score(self, value: Any, place: str) -> float | None:
        value = scalar(value)
        if value is None:
            return None
        if not isinstance(value, numbers.Real) or not abs(value) <= sys.float_info.max:  # type: ignore[operator]
            raise RewardError(
                f"{self.who} returned {show(value)} for {place}; expected a finite number, or None for no score"
            )
        return float(value)

    def score(self, samples: Samples) -> list[float | None]:
        """Return one score (or None) per sample; see ``score_all``."""
        return score_all([self], samples)[0]

    def close(self) -> None:
        """Do nothing."""


def score_all(
    functions: Sequence[FunctionReward], samples: Samples, retries: Retries = NEVER
) -> list[list[float | None]]:
    """Return the scores of every function. Awaitables are awaited concurrently, after all functions were called.

    A function that raised a transient error, such as a timeout, is called again with the same random state; failed
    awaitables are awaited concurrently again.

    Raises:
        RewardError: a function raised an error or returned invalid scores; the message names the first one and its
            rows.
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
    except FAILURES as error:  # reported after the others have been awaited
        return error
