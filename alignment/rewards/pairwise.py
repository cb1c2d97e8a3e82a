"""The interfaces of judges, with the names used by TRL. A judge does not have to inherit from any of them.

A pairwise judge can also be a function, see :class:`alignment.rewards.judges.Judge`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from alignment.config.errors import OptionError, listing, show


class BaseJudge(ABC):
    """Base class of judges."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[Any], shuffle_order: bool = True) -> list[Any]:
        """Judge the completions of each prompt.

        Args:
            prompts: (P,) texts.
            completions: (P,) the completions of each prompt.
            shuffle_order: show them in random order, to avoid position bias.
        """


class BaseRankJudge(BaseJudge):
    """Ranks any number of completions of each prompt."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[list[int]]:
        """Return for each of the P prompts the indices of its completions, best first; see :class:`BaseJudge`."""


class BasePairwiseJudge(BaseJudge):
    """Selects the better of two completions of each prompt."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[int]:
        """Return for each of the P prompts 0 (the first completion is better), 1 (the second) or -1 (no verdict)."""


class BaseBinaryJudge(BaseJudge):
    """Decides for single completions whether they satisfy a criterion."""

    @abstractmethod
    def judge(  # type: ignore[override]  # TRL's order of arguments
        self,
        prompts: list[str],
        completions: list[str],
        gold_completions: list[str] | None = None,
        shuffle_order: bool = True,
    ) -> list[int]:
        """Return for each of the P completions 1 (yes), 0 (no) or -1 (no verdict).

        Args:
            prompts: (P,) texts.
            completions: (P,) one completion for each prompt.
            gold_completions: (P,) reference completions, if available.
            shuffle_order: has no effect on single completions.
        """


class AllTrueJudge(BaseBinaryJudge):
    """Returns 1 if all of several judges return 1, -1 if one of them has no verdict, otherwise 0.

    The mixture of judges of CGPO (https://huggingface.co/papers/2409.20370).

    Args:
        judges: judges of single completions.
    """

    def __init__(self, judges: Sequence[BaseBinaryJudge]) -> None:
        self.judges = list(judges)
        if not self.judges:
            raise OptionError("judges: the list is empty; pass at least one judge")

    def judge(  # type: ignore[override]  # TRL's order of arguments
        self,
        prompts: list[str],
        completions: list[str],
        gold_completions: list[str] | None = None,
        shuffle_order: bool = True,
    ) -> list[int]:
        """See :class:`BaseBinaryJudge`.

        Raises:
            ValueError: a judge returned a value other than 1, 0 and -1.
        """
        everyone = [judge.judge(prompts, completions, gold_completions, shuffle_order) for judge in self.judges]
        found = []
        for verdicts in zip(*everyone, strict=True):
            strange = [verdict for verdict in verdicts if verdict not in (0, 1, -1)]
            if strange:
                raise ValueError(f"a judge returned {listing(map(show, strange))}; expected 1, 0 or -1")
            found.append(-1 if -1 in verdicts else int(all(verdict == 1 for verdict in verdicts)))
        return found
