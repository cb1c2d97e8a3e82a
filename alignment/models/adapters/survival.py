"""Measure how much of an update survives when the sum of weight and update is rounded to a floating-point format.

With update ``u`` and rounding ``r``, the effective update is ``v = r(W + u) - r(W)``. In bf16 the relative distance
between adjacent numbers is 2**-8 to 2**-7: most elements of a smaller update are lost, and a few are rounded up to a
full step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

_CHUNK = 2**20  # elements per dot product: few enough for fp32 precision and for the cache


@dataclass(frozen=True)
class Survival:
    """How much of the update of one tensor, or of all tensors together, survives rounding.

    Attributes:
        name: name of the tensor; empty for all.
        cosine: cosine similarity of ``u`` and ``v``; 0 if nothing is left, 1 if there was no update.
        norm_ratio: norm of ``v`` divided by the norm of ``u``; 1 if there was no update.
        update: norm of ``u`` divided by the norm of ``W``; infinite if the base weights are all zero.
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
    """Accumulates the tensors of a merge one at a time."""

    tensors: int = 0
    _sums: _Sums = field(default_factory=_Sums)
    _worst: Survival | None = None

    def add(self, name: str, before: Tensor, after: Tensor, target: torch.dtype) -> None:
        """Measure one tensor.

        Args:
            name: name of the tensor.
            before: the base weights, any shape and dtype.
            after: the merged weights before rounding, fp32, same shape.
            target: the dtype to which they are rounded.
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
        """The result for all tensors as one vector."""
        return self._sums.survival("")

    @property
    def worst(self) -> Survival | None:
        """The result for the tensor with the smallest cosine, or None if no tensor was updated."""
        return self._worst
