"""The interfaces of judges, by the names that scripts know from TRL; a judge need not be derived from any of them.

A judge of pairs may as well be a function, see :class:`alignment.rewards.judges.Judge`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from alignment.config.errors import OptionError, listing, show


class BaseJudge(ABC):
    """Anything that judges completions."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[Any], shuffle_order: bool = True) -> list[Any]:
        """A judgement of each prompt's completions.

        Args:
            prompts: (P,) texts.
            completions: (P,) what answers them.
            shuffle_order: show them in an order drawn at random, so that no position is favoured.
        """


class BaseRankJudge(BaseJudge):
    """Ranks any number of completions: for each prompt their places, the best first."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[list[int]]:
        """(P,) for each prompt the numbers of its completions, from best to worst; see :class:`BaseJudge`."""


class BasePairwiseJudge(BaseJudge):
    """Compares two completions: for each prompt the number of the better one."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[int]:
        """(P,) for each prompt 0 (the first of its two completions is better), 1 (the second is) or -1 (unknown)."""


class BaseBinaryJudge(BaseJudge):
    """Says of single completions whether they satisfy something."""

    @abstractmethod
    def judge(  # type: ignore[override]  # TRL's order of arguments
        self,
        prompts: list[str],
        completions: list[str],
        gold_completions: list[str] | None = None,
        shuffle_order: bool = True,
    ) -> list[int]:
        """(P,) for each completion 1 (it does), 0 (it does not) or -1 (no verdict).

        Args:
            prompts: (P,) texts.
            completions: (P,) one for each.
            gold_completions: (P,) what the completions should be like, where that is known.
            shuffle_order: of no effect on single completions.
        """


class AllTrueJudge(BaseBinaryJudge):
    """1 where every one of several judges says 1, -1 where one of them has no verdict, else 0.

    The mixture of judges of CGPO (https://huggingface.co/papers/2409.20370).

    Args:
        judges: of single completions.
    """

    def __init__(self, judges: Sequence[BaseBinaryJudge]) -> None:
        self.judges = list(judges)
        if not self.judges:
            raise OptionError("judges: none were given, so there is nothing to agree on; give at least one")

    def judge(  # type: ignore[override]  # TRL's order of arguments
        self,
        prompts: list[str],
        completions: list[str],
        gold_completions: list[str] | None = None,
        shuffle_order: bool = True,
    ) -> list[int]:
        """As :class:`BaseBinaryJudge` says.

        Raises:
            ValueError: one of the judges answered with something else than 1, 0 and -1.
        """
        everyone = [judge.judge(prompts, completions, gold_completions, shuffle_order) for judge in self.judges]
        found = []
        for verdicts in zip(*everyone, strict=True):
            strange = [verdict for verdict in verdicts if verdict not in (0, 1, -1)]
            if strange:
                raise ValueError(f"a judge returned {listing(map(show, strange))}; it has to return 1, 0 or -1")
            found.append(-1 if -1 in verdicts else int(all(verdict == 1 for verdict in verdicts)))
        return found
