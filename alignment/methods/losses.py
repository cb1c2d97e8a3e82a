"""The options of losses, from the table of a method: choices, checks and papers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, NoReturn

from alignment.config.errors import OptionError, refuse, setting
from alignment.config.fields import option_fields
from alignment.config.registry import Paper
from alignment.objectives.table import Loss

if TYPE_CHECKING:
    from torch import Tensor


def listed(names: Iterable[str]) -> str:
    """Return the names of losses as text, such as ``a, b or c`` with each name as code."""
    *others, last = (f"`{name}`" for name in names)
    return f"{', '.join(others)} or {last}" if others else last


def papers(losses: Mapping[str, Loss], title: str = "", url: str = "") -> dict[str, Paper]:
    """Return the papers that a model card cites: by loss, and for ``""`` the method's own if it has a ``title``."""
    own = {"": Paper(title, url)} if title else {}
    return own | {name: Paper(*loss.paper) for name, loss in losses.items() if loss.paper is not None}


def check_losses(options: Any, chosen: Sequence[str], **unread: float) -> None:
    """Check the options that losses read. If no selected loss reads an option, it must have its default.

    Args:
        options: options of the run, with a table ``LOSSES``.
        chosen: names of the selected losses.
        unread: values that are accepted like the default, for options that are unset by default.

    Raises:
        OptionError: a value that a selected loss does not allow, or an option that no selected loss reads.
    """
    losses: Mapping[str, Loss] = options.LOSSES
    defaults = {field.name: field.default for field in option_fields(options)} | unread
    for name in dict.fromkeys(name for loss in losses.values() for name in loss.reads):
        value, readers = getattr(options, name), [one for one in chosen if name in losses[one].reads]
        if value is None:
            continue
        if not readers and value != defaults[name]:
            refuse_unread(options, name)
        for one in readers:
            if not losses[one].reads[name].allows(value):
                refuse(options, name, f"must be {losses[one].reads[name].phrase} with loss_type={one!r}")


def check_formulas(options: Any, chosen: Sequence[str]) -> None:
    """Raise :class:`OptionError` if the function of a loss of pairs does not take what it is called with."""
    for name in chosen:
        loss = options.LOSSES[name]
        try:
            signature(loss.function).bind("chosen", "rejected", "beta", **loss.reads)
        except TypeError as error:
            refuse(options, "loss_type", f"{error}; it is called with chosen, rejected, beta and what its Loss reads")


def check_values(name: str, losses: Tensor, pairs: int) -> None:
    """Raise :class:`OptionError` if the function of loss ``name`` has not returned one value per pair."""
    if losses.shape != (pairs,):
        found = f"a tensor of shape {tuple(losses.shape)}, expected ({pairs},)"
        raise OptionError(f"{setting('loss_type', name)}: its function returned {found}: one value per pair, no mean")


def refuse_unread(options: Any, name: str, sets: str = "") -> NoReturn:
    """Raise :class:`OptionError` for an option that no selected loss reads.

    Args:
        options: options of the run, with a table ``LOSSES``.
        name: the option.
        sets: name of the option that losses read, if ``name`` only sets it.
    """
    readers = ", ".join(one for one, loss in options.LOSSES.items() if (sets or name) in loss.reads)
    chosen = setting("loss_type", options.loss_type)
    refuse(options, name, f"has no effect with {chosen}; remove it, or set loss_type to one of {readers}")
