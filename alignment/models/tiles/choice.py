"""Choose how tiles are computed: with Triton kernels on GPUs that support them, with torch operations otherwise.

All ranks make the same choice. Before training starts, each rank compiles the kernels and compares their results with
those of torch operations on a small tile, in the dtype of each model. The kernels are used only if this succeeds on
every rank.

The environment variable ``ALIGNMENT_HEAD_TILES`` is for comparisons and tests: ``torch`` disables the kernels;
``triton`` uses them without the comparison, even for CPU tensors with Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.config.errors import OptionError
from alignment.models.tiles import plain
from alignment.models.tiles.products import LogitTransform

VARIABLE = "ALIGNMENT_HEAD_TILES"
_WAYS = ("auto", "torch", "triton")
_OLDEST_TRITON = (3, 4)  # the version for torch 2.8
_ROWS, _WIDTH, _VOCABULARY = 16, 32, 5000  # size of the test tile: two blocks, the second one partially filled
_OUTPUTS = (
    *("log-probs", "log-sum-exps", "jacobian", "entropies", "mean logits", "hits"),
    *("coefficients", "gradient of the bias"),
)
_TOLERANCE = 2e-2  # relative to the largest entry; coefficients are rounded to 16 bits


class Tiles(NamedTuple):
    """An implementation of tile computations: the functions of ``plain`` or of ``fused``."""

    score_tile: Callable[..., plain.TileScores]
    head_coefficients: Callable[..., tuple[Tensor, Tensor | None]]


PLAIN = Tiles(plain.score_tile, plain.head_coefficients)
_settled: dict[tuple[str, torch.dtype], bool] = {}  # by device type and dtype


def _asked() -> str:
    way = os.environ.get(VARIABLE, "auto")
    if way not in _WAYS:
        raise OptionError(f"{VARIABLE}={way}: expected one of {', '.join(_WAYS)}")
    return way


def fused_tiles() -> Tiles:
    """Import the kernels on first use.

    Raises:
        ImportError: Triton is not installed, or too old.
    """
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < _OLDEST_TRITON:
        raise ImportError(f"triton {triton.__version__} is older than {'.'.join(map(str, _OLDEST_TRITON))}")
    from alignment.models.tiles import fused

    return Tiles(fused.score_tile, fused.head_coefficients)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def tiles_for(hidden: Tensor) -> Tiles:
    """Return the implementation for the tiles of these hidden states.

    Raises:
        OptionError: ``ALIGNMENT_HEAD_TILES=triton``, but Triton cannot be used.
    """
    way = _asked()
    if way == "torch" or torch.promote_types(hidden.dtype, torch.float32) != torch.float32:
        return PLAIN
    if way == "auto":
        here = [works for (device, _), works in _settled.items() if device == hidden.device.type]
        return fused_tiles() if here and all(here) else PLAIN
    if not hidden.is_cuda and not _interpreting():
        raise OptionError(
            f"{VARIABLE}=triton: {hidden.device.type} tensors require TRITON_INTERPRET=1; set it, or unset {VARIABLE}"
        )
    try:
        return fused_tiles()
    except ImportError as error:
        raise OptionError(f"{VARIABLE}=triton: {error}; install triton, or unset {VARIABLE}") from error


def settle(device: torch.device, dtype: torch.dtype, agreed: Callable[[bool], bool]) -> None:
    """Determine once per dtype whether all ranks can use the kernels on their GPUs; collective.

    If not, rank 0 prints a line with the reason. On a CPU, nothing is done.

    Args:
        device: this rank's device.
        dtype: dtype of the model's weights.
        agreed: collective that returns whether its argument is true on all ranks.
    """
    if device.type != "cuda" or (device.type, dtype) in _settled:
        return
    reason = _reason_against(device, dtype)
    works = _settled[device.type, dtype] = agreed(reason is None)
    if not works and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        print(
            f"log-probs: using torch operations instead of Triton kernels: {reason or 'they failed on another rank'}",
            flush=True,
        )


def _reason_against(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why this rank cannot use the kernels, in one line, or None if it can."""
    if _asked() == "torch":
        return f"{VARIABLE}=torch"
    if _interpreting():
        return "TRITON_INTERPRET is set"
    try:
        return trial(fused_tiles(), device, dtype)
    except Exception as error:  # errors of the compiler, the driver or an unsupported GPU
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def trial(tiles: Tiles, device: torch.device, dtype: torch.dtype) -> str | None:
    """Compare an implementation with ``plain`` on a small tile that uses every feature.

    Returns:
        What differs, or None.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (_ROWS, _WIDTH), (_VOCABULARY, _WIDTH), (_VOCABULARY,), (_ROWS,)
    hidden, weight, bias, grad = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    hidden, weight, bias = hidden.to(dtype), weight.to(dtype), bias.to(dtype)
    targets = torch.arange(_ROWS, device=device) * 311
    targets[:4] = (hidden.float() @ weight.float().t() + bias.float()).argmax(1)[:4]
    transform = LogitTransform(0.5, 20.0)
    answers = []
    for way in (tiles, PLAIN):
        scored = way.score_tile(hidden, weight, bias, targets, transform, True, True)
        logits = hidden.float() @ weight.float().t()
        found, sums = way.head_coefficients(logits, bias, targets, scored.lse, grad, transform, dtype)
        assert scored.jacobian is not None and scored.stats is not None and sums is not None
        answers.append((scored.logps, scored.lse, scored.jacobian, *scored.stats, found, sums))
    for name, ours, theirs in zip(_OUTPUTS, *answers):
        error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        if not float(error) < _TOLERANCE:
            return f"{name} of a small tile differ by {float(error):.1e} of the largest"
    return None
