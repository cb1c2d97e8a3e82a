"""The layout of sequences in one row without padding, in which sequences of a group share their common prefix."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.data.transfer import OnDevice


class Group(NamedTuple):
    """Sequences whose first ``prefix`` tokens are equal; each has at least one more token."""

    sequences: tuple[int, ...]
    prefix: int


class Piece(NamedTuple):
    """Consecutive tokens of a row that attend to the same prefix, and causally to each other.

    Attributes:
        start, stop: the tokens ``[start, stop)`` of the row.
        prefix, shared: start and length of the prefix; 0 for a prefix itself, or for a sequence that shares nothing.
    """

    start: int
    stop: int
    prefix: int = 0
    shared: int = 0

    @property
    def keys(self) -> int:
        """The number of tokens that its last token sees."""
        return self.shared + self.stop - self.start

    @property
    def attended(self) -> Tensor:
        """The places of these tokens in the row: (keys,) int64."""
        return torch.cat([torch.arange(self.prefix, self.prefix + self.shared), torch.arange(self.start, self.stop)])


@dataclass(frozen=True)
class Layout(OnDevice):
    """Where the tokens of S sequences are in a row of T tokens, and which of them each token attends to.

    The groups are one after another, each a prefix and its suffixes. With the sequences ``abcXY``, ``abcZ`` and
    ``de``, of which the first two are a group::

        row            a b c X Y Z d e          T = 8
        position_ids   0 1 2 3 4 3 0 1          a suffix continues at the length of its prefix
        pieces         [0, 3) [3, 5) [5, 6) [6, 8)
        cu_seqlens     0 3 5 6 8                N = 4 pieces
        keys           a b c | a b c X Y | a b c Z | d e
        cu_seqlens_k   0 3 8 12 14              K = 14

    Attributes:
        sequences: for each sequence the piece with its last tokens, which begins with all its tokens or with those
            after the prefix.
        pieces: all N pieces in the order of the row.
        cu_seqlens: (N + 1,) int32, where the pieces begin in the row, followed by T.
        cu_seqlens_k: (N + 1,) int32, where their keys begin in ``keys``, followed by K.
        keys: (K,) int64, the tokens that each piece attends to: those of its prefix, then its own. None if there are
            no prefixes, so that these are the tokens of the row.
    """

    sequences: tuple[Piece, ...]
    pieces: tuple[Piece, ...]
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor
    keys: Tensor | None

    @classmethod
    def of(cls, lengths: Sequence[int], groups: Sequence[Group] = ()) -> Layout:
        """Lay out sequences of these lengths. A sequence that is in no group, or in one without a prefix, is alone."""
        sequences: dict[int, Piece] = {}
        pieces: list[Piece] = []
        end = 0
        grouped = {number for group in groups for number in group.sequences}
        alone = (Group((number,), 0) for number in range(len(lengths)) if number not in grouped)
        for group in sorted([*groups, *alone], key=lambda group: group.sequences):
            start = end
            if group.prefix:
                end += group.prefix
                pieces.append(Piece(start, end))
            for number in group.sequences:
                sequences[number] = Piece(end, end + lengths[number] - group.prefix, start, group.prefix)
                pieces.append(sequences[number])
                end = sequences[number].stop
        return cls(
            sequences=tuple(sequences[number] for number in range(len(lengths))),
            pieces=tuple(pieces),
            cu_seqlens=_ends([piece.stop - piece.start for piece in pieces]),
            cu_seqlens_k=_ends([piece.keys for piece in pieces]),
            keys=torch.cat([piece.attended for piece in pieces]) if any(piece.shared for piece in pieces) else None,
        )

    @property
    def position_ids(self) -> Tensor:
        """(1, T) int64, the position of each token in its sequence."""
        return torch.cat([torch.arange(piece.shared, piece.keys) for piece in self.pieces])[None]

    def places(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """Return the (N,) places in the row of the tokens at these ``positions`` (N,) in ``sequences`` (N,)."""
        start, _, prefix, shared = torch.tensor(self.sequences)[sequences].unbind(-1)
        return torch.where(positions < shared, prefix + positions, start - shared + positions)


def _ends(lengths: list[int]) -> Tensor:
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)
