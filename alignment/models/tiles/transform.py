"""The transform that a model applies to its raw logits: a scale and a soft cap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitTransform:
    """The transform of raw logits, ``cap * tanh(scale * z / cap)``; without the tanh if ``softcap`` is None."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Return the transformed logits, differentiable by autograd."""
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def apply_(self, logits: Tensor) -> Tensor:
        """Transform a tile of logits in place, without autograd."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def derivative(self, logits: Tensor) -> Tensor | float:
        """Return d(transformed)/d(raw), computed from the *transformed* logits; a number if it is constant."""
        if self.softcap is None:
            return self.scale
        slope = (logits / self.softcap).square_()
        torch.sub(slope.new_ones(()), slope, out=slope)
        return slope if self.scale == 1.0 else slope.mul_(self.scale)
