"""An entry of a method's table of losses: a formula, with the options that it reads and the inputs that it needs.

A table ``LOSSES`` is the only place that names the losses of a method. Options, option tables, model cards and the
method read it. Modules with a table do not import torch, so that options can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

# reference: log-ratios to the reference instead of log-probs. lengths: means over the completion's tokens instead of
# sums. kl: the KL divergence of mismatched completions. tokens: log-probs of single tokens.
Need: TypeAlias = Literal["reference", "lengths", "kl", "tokens"]


class Range(NamedTuple):
    """The allowed values of an option: a phrase for messages, and the condition."""

    phrase: str
    allows: Callable[[float], bool]


ANY = Range("a number", lambda value: True)
NOT_ZERO = Range("different from 0", lambda value: value != 0)
POSITIVE = Range("greater than 0", lambda value: value > 0)
NOT_NEGATIVE = Range("at least 0", lambda value: value >= 0)
BELOW_HALF = Range("at least 0 and less than 0.5", lambda value: 0 <= value < 0.5)
WITHIN_HALF = Range("greater than 0 and less than 0.5", lambda value: 0 < value < 0.5)

# Papers of losses that several methods have.
SLIC = ("SLiC-HF: Sequence Likelihood Calibration with Human Feedback", "https://arxiv.org/abs/2305.10425")
IPO = (
    "A General Theoretical Paradigm to Understand Learning from Human Preferences",
    "https://arxiv.org/abs/2310.12036",
)
APO = (
    "Anchored Preference Optimization and Contrastive Revisions: Addressing Underspecification in Alignment",
    "https://arxiv.org/abs/2408.06266",
)


@dataclass(frozen=True)
class Loss:
    """A loss.

    Attributes:
        function: the formula; see the module of the table for its arguments and results.
        paper: title and address of the paper that a model card cites, in addition to the method's; None for none.
        reads: the options that the formula reads besides ``beta``, by name, with their allowed values.
        needs: its inputs.
        per_token: the loss of a window is a mean over its completion tokens instead of its rows.
        defaults: defaults of options that differ from those with other losses.
    """

    function: Callable[..., Any]
    paper: tuple[str, str] | None = None
    reads: Mapping[str, Range] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()
    per_token: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)

    def options(self, given: Any) -> dict[str, float]:
        """Return the values of ``reads`` in the options ``given``."""
        return {name: getattr(given, name) for name in self.reads}


def log_sigmoid(values: Tensor) -> Tensor:
    """Return ``torch.nn.functional.logsigmoid``, importing torch on the first call."""
    from torch.nn.functional import logsigmoid

    return logsigmoid(values)
