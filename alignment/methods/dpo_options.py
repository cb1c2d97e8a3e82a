"""The options of DPO on preference pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from alignment.compat.trl.table import DPOCompatibility
from alignment.config import checks
from alignment.config.errors import counted, did_you_mean, listing, refuse, setting
from alignment.config.fields import Count, Positive, option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions, Truncation
from alignment.config.options_model import ReferenceOptions
from alignment.config.registry import Paper
from alignment.methods.losses import check_formulas, check_losses, listed, papers
from alignment.objectives import dpo
from alignment.objectives.table import Loss

_SORTS = "is not supported, because it sorts a batch, so that it depends on the split into micro-batches"
# Further losses of TRL, which are not supported, and why.
_ELSEWHERE = {"aot": _SORTS, "aot_unpaired": _SORTS}


@dataclass(kw_only=True)
class DPOConfig(ReferenceOptions, SequenceOptions, DPOCompatibility, AlignmentConfig):
    """Options of direct preference optimization (https://arxiv.org/abs/2305.18290).

    Raises:
        OptionError: an unknown name, a value of the wrong type, or an invalid value.
    """

    TITLE: ClassVar[str] = "DPO"
    method: ClassVar[str] = "dpo"
    LOSSES: ClassVar[Mapping[str, Loss]] = dpo.LOSSES
    PAPERS: ClassVar[Mapping[str, Paper]] = papers(
        LOSSES,
        "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
        "https://arxiv.org/abs/2305.18290",
    )
    SHORTEN_PROMPTS: ClassVar[bool] = False

    max_prompt_length: Count | None = option(
        None, "Maximum length of the prompt, in tokens. If unset, only `max_length` applies."
    )
    truncation_mode: Truncation = option(
        "keep_start", "Which part of an overlong prompt to keep: `keep_end` or `keep_start`."
    )
    loss_type: list[str] | str | None = option(
        "sigmoid", f"Loss, or several losses to add up: {listed(LOSSES)}.", several=True
    )
    loss_weights: list[float] | None = option(
        None, "Weights of the losses in `loss_type`. Defaults to 1 for each.", several=True
    )
    beta: Positive = option(0.1, "Strength of the regularization toward the reference; tau for `ipo`.")
    label_smoothing: float = option(
        0.0,
        "Assumed probability that the labels of a pair are swapped by mistake. For `sigmoid`, `robust` and "
        "`exo_pair`, which requires it.",
    )
    discopop_tau: float = option(0.05, "Temperature of `discopop`.")

    def resolve(self) -> None:
        """Translate ``precompute_ref_log_probs``; a list with a single loss becomes that loss."""
        checks.resolve_reference(self)
        if self.loss_type is None:
            self.loss_type = "sigmoid"
        if isinstance(self.loss_type, list) and len(self.loss_type) == 1:
            (self.loss_type,) = self.loss_type

    def check(self) -> None:
        """Check the options of DPO."""
        checks.check_lengths(self, rows_per_unit=2)
        checks.need_reference(self, "DPO")
        checks.refuse_labels(self, "DPO")
        names, known = self._names(), listing(self.LOSSES)
        for name in names:
            if name in _ELSEWHERE:
                refuse(self, "loss_type", f"{name!r} {_ELSEWHERE[name]}; set one of {known}")
            if name not in self.LOSSES:
                near = did_you_mean(name, self.LOSSES)
                refuse(self, "loss_type", f"unknown loss {name!r}; set one of {known}{near}")
        if not names:
            refuse(self, "loss_type", f"no loss; set one of {known}")
        if self.loss_weights is not None and len(self.loss_weights) != len(names):
            each = f"one for each loss in {setting('loss_type', self.loss_type)}"
            refuse(self, "loss_weights", f"expected {counted(len(names), 'weight')}, {each}")
        if self.loss_weights is not None and min(self.loss_weights) <= 0:
            refuse(self, "loss_weights", "must be greater than 0; remove a loss instead of setting its weight to 0")
        check_losses(self, names)
        check_formulas(self, names)

    def _names(self) -> list[str]:
        return self.loss_type if isinstance(self.loss_type, list) else [self.loss_type or "sigmoid"]

    @property
    def losses(self) -> list[tuple[str, float]]:
        """The names of the losses to add up, with their weights."""
        names = self._names()
        return list(zip(names, self.loss_weights or [1.0] * len(names)))
