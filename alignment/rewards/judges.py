"""Pairwise judges: a user's code that says which of two completions is better, not how good each is."""

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
from alignment.engines.watch.retries import NEVER, Retries
from alignment.reporting.completions import as_text
from alignment.rewards.callables import as_list, name_of, raise_together, scalar, span, together
from alignment.rewards.endpoint import EndpointJudge
from alignment.rewards.pairwise import BaseBinaryJudge, BaseRankJudge
from alignment.rewards.questions import FAILED


class Judge:
    """A judge made of a callable, or of an object with a method ``judge``; either may be a coroutine function.

    It is called with two lists, the prompts and for each a list of two completions, and returns for each 0 (the first
    is better), 1 (the second is) or -1 (it cannot say). One with TRL's signature, which has a ``shuffle_order``, is
    given conversations as texts, as TRL does.

    Args:
        judge: the callable or object.
        name: for messages; its own if None.
        retries: of its calls that fail for a reason that may pass.

    Raises:
        OptionError: it cannot be called so.
    """

    def __init__(self, judge: Any, name: str | None = None, retries: Retries = NEVER) -> None:
        self.retries = retries
        self.name = name or name_of(judge)
        self.who = f"judge {self.name!r}"
        self.code = judge
        self._call = getattr(judge, "judge", judge)
        if isinstance(judge, type) or not callable(self._call):
            raise OptionError(f"{self.who} is {show(judge)}; give a function, or an object with a method 'judge'")
        if isinstance(judge, (BaseBinaryJudge, BaseRankJudge)):
            raise OptionError(f"{self.who} compares no pairs; give a BasePairwiseJudge, or score with reward_funcs")
        self._takes_texts = False
        try:
            signature = inspect.signature(self._call)
            signature.bind([], [])
            self._takes_texts = "shuffle_order" in signature.parameters
        except TypeError as error:
            raise OptionError(
                f"{self.who} cannot be called with two arguments ({error}); let it take prompts and pairs"
            ) from error
        except ValueError:
            return  # a built-in that does not tell: calling it will show

    def ready(self) -> list[str]:
        """Ask a judge at an endpoint whether it is there, on the first rank; a line that says so. Collective.

        Raises:
            RewardError: it is not; the same on every rank.
        """
        if not isinstance(self.code, EndpointJudge):
            return []
        on_first_rank(self.code.check)
        return [f"judge: {self.code.where}"]

    def looked_at(self) -> list[str]:
        """What a dry run says of a judge at an endpoint, which it asks once whether it is there."""
        if not isinstance(self.code, EndpointJudge):
            return []
        try:
            self.code.check(retries=0)
        except RewardError as error:
            return [f"{error}. A run would end here"]
        return [f"judge {self.code.where}: it is there"]

    def verdicts(
        self, prompts: Sequence[Text], pairs: Sequence[Sequence[Text]], seed: int, places: Sequence[str]
    ) -> list[int]:
        """For each pair 0 (the first is better), 1 (the second is) or -1 (no verdict). Collective.

        Half of the pairs, drawn from the seed, are shown the other way round, and their answers turned back: a judge
        that favours a position favours neither completion.

        Args:
            prompts: (P,) this rank's; there may be none, and then the judge is not called.
            pairs: (P,) two completions each.
            seed: of the order; another one for every step and rank.
            places: (P,) names of the prompts' rows, for messages.

        Raises:
            RewardError: the judge raised or returned what are no verdicts, here or on another rank; the same on every.
        """
        # Not Python's generator: a judge that tosses a coin, seeded alike, would toss what turned the pairs.
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
            # Copies: a judge that is asked again must not be shown what it has changed.
            returned = self.retries(self.who, as_before(lambda: self._answer(*copy.deepcopy((prompts, pairs)))))
        except Leaving:
            raise
        except RewardError as error:  # of a judge of ours, which has said it all
            raise RewardError(f"{error} (judging {span(places)})") from None
        except FAILURES as error:
            raise RewardError(
                f"{self.who} raised {raised(error)} while judging {span(places)}; correct it, or let it return -1 for "
                "what it cannot judge"
            ) from error
        values = as_list(returned, self.who, places, "verdicts", "pairs")
        return [self._verdict(value, place) for value, place in zip(values, places)]

    def _answer(self, prompts: list[Any], pairs: list[list[Any]]) -> Any:
        if self._takes_texts:
            prompts, pairs = [as_text(prompt) for prompt in prompts], [[as_text(each) for each in p] for p in pairs]
        returned = self._call(prompts, pairs)
        if inspect.isawaitable(returned):
            (returned,) = together([returned])
            if isinstance(returned, BaseException):
                raise returned
        return returned

    def _verdict(self, value: Any, place: str) -> int:
        value = scalar(value)
        # A boolean would be taken for its number, where True may well mean that the first is better.
        if not isinstance(value, int) or isinstance(value, bool) or value not in (0, 1, FAILED):
            raise RewardError(
                f"{self.who} returned {show(value)} for {place}; return 0 (the first is better), 1 (the second is) or "
                "-1 (no verdict)"
            )
        return value
