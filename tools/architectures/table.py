"""The table of ``docs/reference/architectures.md``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers

from tools.architectures.comparison import LENGTHS, TOLERANCE, Result
from tools.ranks.client import ROOT

PAGE = ROOT / "docs" / "reference" / "architectures.md"
_HEAD = """\
# Architectures

Every type of causal language model of transformers {transformers}, {count} in all: {exact} are exact, {refused} are
refused with the reason. `python -m tools.architectures` wrote this page (torch {torch}, CPU, fp32); a slow test runs
the same comparison.

*Exact*: a model of the type with small random weights, its logits scaled and capped where its configuration can do so,
scores {rows} rows of {lengths} tokens as this project does it (one batch padded on the right, no attention mask, no
logits) and by its own logits (each row by itself, `log_softmax`, autograd). The columns are the largest difference of
a log-prob in parts of the largest log-prob, and the norm of the difference of the gradient of all parameters in parts
of its norm. The limit of both is {tolerance:g}.

*Refused*: with a message that names the type and the reason, before weights are loaded where the reason is known. A
type that is not in this table, such as one that comes with its own code, is compared with its own logits each time an
engine is built, and refused if they differ by more than rounding.

| type | class | | log-probs | gradient | |
|---|---|---|---|---|---|
"""


def page(results: Sequence[Result]) -> str:
    """The page for results of all types."""
    exact = sum(result.exact for result in results)
    head = _HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        count=len(results),
        exact=exact,
        refused=sum(result.refused is not None for result in results),
        rows=len(LENGTHS),
        lengths=", ".join(map(str, LENGTHS[:-1])) + f" and {LENGTHS[-1]}",
        tolerance=TOLERANCE,
    )
    return head + "".join(f"{row(result)}\n" for result in results)


def row(result: Result) -> str:
    """One line of the table."""
    named = f"| {result.model_type} | {result.architecture} |"
    if result.refused is not None:
        return f"{named} refused | | | {result.refused} |"
    word = "exact" if result.exact else "**differs**"
    return f"{named} {word} | {result.logps:.0e} | {result.gradient:.0e} | {result.note} |"
