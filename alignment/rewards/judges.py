"""Pairwise judges: user code that selects the better of two completions without scoring them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from alignment.config.errors import Leaving, OptionError, RewardError, show
from alignment.config.lookup import FAILURES, raised
from alignment.data.messages import Text
from alignment.engines.collectives import on_first_rank
from alignment.engines.rng import as_before
from alignment.reporting.log import as_text
from alignment.rewards.callables import as_list, name_of, raise_together, scalar, span, together
from alignment.rewards.llm_judge import FAILED, LLMJudge
from alignment.run.retries import NEVER, Retries


class Judge:
    """Wraps a callable, or an object with a method ``judge``; either may be a coroutine function.

    It is called with two lists, the prompts and a list of two completions for each, and returns for each pair 0 (the
    first is better), 1 (the second is better) or -1 (no verdict). A judge with TRL's signature, which has a
    ``shuffle_order``, gets conversations as text, as in TRL, and false for it: :meth:`verdicts` chooses the orders.

    Args:
        judge: the callable or object.
        retries: retries of calls that fail with a transient error.

    Raises:
        OptionError: the judge cannot be called in this way.
    """

    def __init__(self, judge: Any, retries: Retries = NEVER) -> None:
        self.retries, self.name = retries, name_of(judge)
        self.who = f"judge {self.name!r}"
        self.code = judge
        self._call = getattr(judge, "judge", judge)
        if isinstance(judge, type) or not callable(self._call):
            raise OptionError(f"{self.who} is {show(judge)}; expected a function, or an object with a method 'judge'")
        signature = inspect.signature(self._call)
        self._takes_texts = "shuffle_order" in signature.parameters
        if "gold_completions" in signature.parameters:
            raise OptionError(f"{self.who} judges single completions; call it from a reward function")
        try:
            signature.bind([], [])
        except TypeError as error:
            raise OptionError(
                f"{self.who} cannot be called with two arguments ({error}); it must take prompts and pairs"
            ) from error

    def ready(self) -> list[str]:
        """Check on rank 0 that an endpoint judge is available; return a line for the start of a run. Collective."""
        if not isinstance(self.code, LLMJudge):
            return []
        on_first_rank(self.code.check)
        return [f"judge: {self.code.where}"]

    def looked_at(self) -> list[str]:
        """Check an endpoint judge once, and return a line for a dry run."""
        if not isinstance(self.code, LLMJudge):
            return []
        try:
            self.code.check(retries=0)
        except RewardError as error:
            return [f"{error}. A run would stop with this error"]
        return [f"judge {self.code.where}: available"]

    def verdicts(
        self, prompts: Sequence[Text], pairs: Sequence[Sequence[Text]], seed: int, places: Sequence[str]
    ) -> list[int]:
        """Return for each pair 0 (the first is better), 1 (the second is better) or -1 (no verdict). Collective.

        Half of the pairs, chosen with the seed, are shown in reverse order and their verdicts reversed, so that a
        judge with a position bias favors neither completion.

        Args:
            prompts: (P,) this rank's prompts; if there are none, the judge is not called.
            pairs: (P,) two completions each.
            seed: seed of the order, different for every step and rank.
            places: (P,) names of the prompts' rows, for messages.

        Raises:
            RewardError: the judge failed on any rank; the same error on all ranks.
        """
        # Not Python's generator: a random judge with the same seed would then depend on the order of the pairs.
        turned = (np.random.default_rng(seed).random(len(pairs)) < 0.5).tolist()
        shown = [list(reversed(pair)) if turn else list(pair) for pair, turn in zip(pairs, turned)]
        failure, answers = None, []
        try:
            answers = self._asked(list(prompts), shown, places) if places else []
        except RewardError as error:
            failure = error
        raise_together(failure, self.retries)
        return [1 - answer if turn and answer != FAILED else answer for answer, turn in zip(answers, turned)]

    def _asked(self, prompts: list[Text], pairs: list[list[Text]], places: Sequence[str]) -> list[int]:
        try:
            # Copies: on a retry, the judge must not see its own modifications.
            returned = self.retries(self.who, as_before(lambda: self._answer(*copy.deepcopy((prompts, pairs)))))
        except Leaving:
            raise
        except RewardError as error:  # raised by one of our judges, with a complete message
            raise RewardError(f"{error} (judging {span(places)})") from None
        except FAILURES as error:
            raise RewardError(
                f"{self.who} raised {raised(error)} while judging {span(places)}; fix the judge, or return -1 for "
                "pairs that it cannot judge"
            ) from error
        values = as_list(returned, self.who, places, "verdicts", "pairs")
        return [self._verdict(value, place) for value, place in zip(values, places)]

    def _answer(self, prompts: list[Any], pairs: list[list[Any]]) -> Any:
        if self._takes_texts:
            prompts, pairs = [as_text(prompt) for prompt in prompts], [[as_text(each) for each in p] for p in pairs]
        returned = self._call(prompts, pairs, **({"shuffle_order": False} if self._takes_texts else {}))
        if inspect.isawaitable(returned):
            (returned,) = together([returned])
            if isinstance(returned, BaseException):
                raise returned
        return returned

    def _verdict(self, value: Any, place: str) -> int:
        value = scalar(value)
        # Reject booleans, which are integers too: True may well mean that the first completion is better.
        if not isinstance(value, int) or isinstance(value, bool) or value not in (0, 1, FAILED):
            raise RewardError(
                f"{self.who} returned {show(value)} for {place}; expected 0 (the first is better), 1 (the second is "
                "better) or -1 (no verdict)"
            )
        return value
