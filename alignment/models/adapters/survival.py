"""How much of an update is left after the sum of weight and update has been rounded to a number format.

With update ``u`` and rounding ``r``, what a model gets is ``v = r(W + u) - r(W)``. In bf16 neighbouring numbers are
2**-8 to 2**-7 of their size apart: of a smaller update most elements round to no change and a few to a whole step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

_CHUNK = 2**20  # elements at once: a product of as many is exact enough in fp32, and its operands stay in the cache


@dataclass(frozen=True)
class Survival:
    """Of one tensor, or of all of them together.

    Attributes:
        name: of the tensor; empty for all.
        cosine: between ``u`` and ``v``; 0 where nothing is left, 1 where there was no update.
        norm_ratio: norm of ``v`` over norm of ``u``; 1 where there was no update.
        update: norm of ``u`` over norm of ``W``; infinite where the base's weights are all zero.
    """

    name: str
    cosine: float
    norm_ratio: float
    update: float


@dataclass
class _Sums:
    """Inner products of ``u``, ``v`` and ``W``, in float64."""

    uv: float = 0.0
    uu: float = 0.0
    vv: float = 0.0
    ww: float = 0.0

    def add(self, other: _Sums) -> None:
        self.uv, self.uu = self.uv + other.uv, self.uu + other.uu
        self.vv, self.ww = self.vv + other.vv, self.ww + other.ww

    def survival(self, name: str) -> Survival:
        if self.uu == 0.0:
            return Survival(name, 1.0, 1.0, 0.0)
        cosine = self.uv / math.sqrt(self.uu * self.vv) if self.vv else 0.0
        update = math.sqrt(self.uu / self.ww) if self.ww else math.inf
        return Survival(name, cosine, math.sqrt(self.vv / self.uu), update)


@dataclass
class SurvivalMeter:
    """Collects the tensors of a merge one at a time."""

    tensors: int = 0
    _sums: _Sums = field(default_factory=_Sums)
    _worst: Survival | None = None

    def add(self, name: str, before: Tensor, after: Tensor, target: torch.dtype) -> None:
        """Measure one tensor.

        Args:
            name: of the tensor.
            before: the base's weights, any shape and dtype.
            after: fp32, the same shape: the merged weights before they are rounded.
            target: the dtype that they are rounded to.
        """
        own = _Sums()
        for old, new in zip(before.reshape(-1).split(_CHUNK), after.reshape(-1).split(_CHUNK)):
            old, new = old.float(), new.float()
            u, v = new - old, new.to(target).float() - old.to(target).float()
            own.add(_Sums(*(float(torch.dot(a, b)) for a, b in ((u, v), (u, u), (v, v), (old, old)))))
        self.tensors += 1
        self._sums.add(own)
        measured = own.survival(name)
        if own.uu and (self._worst is None or measured.cosine < self._worst.cosine):
            self._worst = measured

    @property
    def total(self) -> Survival:
        """All tensors as one vector."""
        return self._sums.survival("")

    @property
    def worst(self) -> Survival | None:
        """The tensor with the smallest cosine; None where nothing was updated."""
        return self._worst
