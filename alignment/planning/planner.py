"""Plan the memory of a run from its configuration alone."""

from __future__ import annotations

import math
from dataclasses import replace

from alignment.config.deepspeed_keys import value_at
from alignment.planning.gradients import GradientPlan, candidates, micro_batches
from alignment.planning.phases import Phases
from alignment.planning.plan import MemoryPlan, NotPlanned
from alignment.planning.planned_run import PlannedRun

_STEP, _MOST = 64, 2**20  # tokens: resolution and limit of the longest sequences


class Planner(PlannedRun):
    """Plans the memory of a run."""

    def plan(self, tokens: int | None = None, checkpointed: int | None = None, *, brief: bool = False) -> MemoryPlan:
        """Return the plan for sequences of up to ``tokens`` tokens.

        Args:
            tokens: tokens of the longest sequence; None: what the options allow.
            checkpointed: number of recomputed layers; None: what the options say, ``auto`` being all.
            brief: leave out passes without gradients over a micro-batch of training, which never need the most.

        Raises:
            NotPlanned: the model cannot be counted.
        """
        return self._phases(self.gradients(tokens), tokens, checkpointed, brief).plan()

    def gradients(self, tokens: int | None = None) -> GradientPlan | None:
        """Return how gradients are accumulated over a window; None if there is nothing to choose.

        This is the first of :func:`candidates` with which training fits in the card, or the one that needs the least.
        It does not depend on the number of recomputed layers that ``auto`` chooses.
        """
        zero = self.engines.policy["zero_optimization"]
        offloaded = value_at(zero, "offload_optimizer.device") == "cpu"
        found = candidates(self.engines.dtypes, int(zero["stage"]), self.ranks, offloaded=offloaded)
        if micro_batches(self.options) == 1 or not found:
            return None
        try:
            chosen, needed = found[0], {}
            if self.card < math.inf:
                for chosen in found:
                    needed[chosen] = self._phases(chosen, tokens).training()
                    if needed[chosen] <= self.card:
                        break
                else:
                    chosen = min(needed, key=needed.__getitem__)
            return replace(chosen, device_bytes=self._phases(chosen, tokens).engine.gradients)
        except NotPlanned:
            return found[0 if self.card == math.inf else -1]

    def _phases(
        self,
        gradients: GradientPlan | None,
        tokens: int | None,
        checkpointed: int | None = None,
        brief: bool = False,
    ) -> Phases:
        weights = self.weights
        if weights is None or not weights.layers:
            raise NotPlanned(f"the decoder layers of {self.engines.source.name} cannot be counted")
        if checkpointed is None:
            checkpointed = weights.layers if self.options.gradient_checkpointing else 0
        return Phases(self, weights, tokens or self.longest, checkpointed, gradients, brief)

    def longest_that_fits(self, card: float, memory: float = math.inf, checkpointed: int | None = None) -> int:
        """Return the longest sequences that fit, within 2 %, a multiple of 64 tokens; 0 if none do.

        Memory grows almost linearly with tokens, so that a few plans are sufficient.
        """

        def needed(tokens: int) -> tuple[int, float]:
            """Return ``tokens``, and the share that they need of a GPU's memory or of a host's, the larger one."""
            plan = self.plan(tokens, checkpointed, brief=True)
            return tokens, max(plan.peak(reserve=True) / card, plan.host_peak() / memory)

        most = min(_MOST, self.positions // _STEP * _STEP or _MOST)
        low, high = needed(1024), needed(4096)
        fitting = max((tokens for tokens, share in (low, high) if share <= 1 and tokens <= most), default=0)
        for _ in range(8):
            growth = max(1e-9, high[1] - low[1]) / (high[0] - low[0])
            guess = int(high[0] + (1 - high[1]) / growth) // _STEP * _STEP
            guess = min(max(guess, _STEP), most)
            if guess in (low[0], high[0]):
                break
            low, high = sorted([high, needed(guess)])
            share = low[1] if low[0] == guess else high[1]
            if share <= 1:
                fitting = max(fitting, guess)
            if 0.98 <= share <= 1 or guess == (most if share <= 1 else _STEP):
                break
        return fitting

    def layers_to_recompute(self, card: float, tokens: int | None = None) -> int:
        """Return the smallest number of recomputed layers with which the run fits; all of them if it never does."""
        low, high = 0, self.plan(tokens, 0, brief=True).layers
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.plan(tokens, middle, brief=True).fits(card) else (middle + 1, high)
        return low
