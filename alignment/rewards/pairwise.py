"""The interfaces of judges, with the names used by TRL. A judge does not have to inherit from any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from alignment.config.errors import OptionError, listing, show


class BaseJudge(ABC):
    """Base class of judges."""

    @abstractmethod
    def judge(self, prompts: list[str], completions: list[Any], shuffle_order: bool = True) -> list[Any]:
        """Judge the completions of P prompts, shown in random order (against position bias) if ``shuffle_order``."""


class BaseRankJudge(BaseJudge):
    """Returns for each of P prompts the indices of its completions, best first."""


class BasePairwiseJudge(BaseJudge):
    """Returns for each of P prompts 0 (its first completion is better), 1 (its second) or -1 (no verdict)."""


class BaseBinaryJudge(BaseJudge):
    """Returns for each of P completions 1 (it satisfies a criterion), 0 (it does not) or -1 (no verdict)."""

    @abstractmethod
    def judge(  # type: ignore[override]  # TRL's order of arguments
        self,
        prompts: list[str],
        completions: list[str],
        gold_completions: list[str] | None = None,
        shuffle_order: bool = True,
    ) -> list[int]:
        """Judge P completions, given reference completions if available."""


class AllTrueJudge(BaseBinaryJudge):
    """Returns 1 if all of several judges of single completions do, -1 if one of them has no verdict, otherwise 0.

    The mixture of judges of CGPO (https://huggingface.co/papers/2409.20370).
    """

    def __init__(self, judges: Sequence[BaseBinaryJudge]) -> None:
        self.judges = list(judges)
        if not self.judges:
            raise OptionError("judges: the list is empty; pass at least one judge")

    def judge(self, *given: Any, **more: Any) -> list[int]:  # type: ignore[override]
        """See :class:`BaseBinaryJudge`."""
        found = []
        for verdicts in zip(*(judge.judge(*given, **more) for judge in self.judges), strict=True):
            strange = [verdict for verdict in verdicts if verdict not in (0, 1, -1)]
            if strange:
                raise ValueError(f"a judge returned {listing(map(show, strange))}; expected 1, 0 or -1")
            found.append(-1 if -1 in verdicts else int(all(verdicts)))
        return found
