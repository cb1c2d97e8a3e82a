"""Refuse subclasses that override methods of transformers' and TRL's trainers that are never called here.

Which these are is computed: those of transformers' ``Trainer`` and, if TRL is installed, of its trainer of the same
name that the trainers of this package do not have.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from alignment.config.errors import OptionError

# What takes the place of a method, by a part of its name.
_INSTEAD = {
    "optimizer|decay_param|learning_rate": "pass optimizers=(optimizer, scheduler), or set optim and learning_rate",
    "scheduler": "pass optimizers=(optimizer, scheduler), or set lr_scheduler_type and lr_scheduler_kwargs",
    "loss|step|forward|logps|log_probs": "derive a Method and override losses(), see docs/guides/extending.md",
    "sampler|dataloader|batch_samples|batch_size": "set data_seed or max_tokens_per_batch, or sort the dataset",
    "dataset|token|column|row": "map the dataset before passing it, or set column_map",
    "save|load|checkpoint": "use a TrainerCallback with on_save",
    "generate": "set the generation options, or implement a RolloutBackend",
    "metric": "override log(), which receives every record",
}
_OTHERWISE = "use a TrainerCallback, options, or a Method of your own, see docs/guides/extending.md"


def check_overrides(trainer: type, base: type) -> None:
    """Refuse a trainer whose class overrides a method that is never called.

    Args:
        trainer: the class of the trainer.
        base: the base class of the trainers of this package.

    Raises:
        OptionError: naming the first such method, and the alternative.
    """
    for kind in _further(trainer):
        for name in vars(kind).keys() & never_called(trainer, base):
            raise _never_called(f"{kind.__name__}.{name}", name)


def check_saving(trainer: type, saves: bool) -> None:
    """Refuse a trainer whose class overrides ``save_model`` if checkpoints are written, which do not call it.

    Raises:
        OptionError: if checkpoints are written and the class overrides it.
    """
    for kind in _further(trainer):
        if saves and "save_model" in vars(kind):
            raise OptionError(
                f"{kind.__name__}.save_model: checkpoints do not call it, so they would lack what it adds; use a "
                "TrainerCallback with on_save, or set save_strategy: no and call save_model yourself"
            )


def check_attributes(trainer: object, base: type) -> None:
    """Refuse a trainer instance on which such a method was set, as in ``trainer.compute_loss = own``.

    Raises:
        OptionError: naming the method and the alternative.
    """
    libraries = ("alignment", "transformers", "torch")  # of whose objects, some are callable: the tokenizer, the model
    given = {name for name, value in vars(trainer).items() if callable(value)}
    given = {name for name in given if type(vars(trainer)[name]).__module__.partition(".")[0] not in libraries}
    for name in given & (never_called(type(trainer), base) if given else set()):
        raise _never_called(f"trainer.{name}", name)


def never_called(trainer: type, base: type) -> set[str]:
    """Return the names of methods of other libraries' trainers that ``base`` and the class's own trainer lack."""
    from transformers import Trainer  # takes a second, and few scripts derive or modify a trainer

    own = next(kind for kind in trainer.__mro__ if _is_ours(kind))
    theirs = {name for name in dir(Trainer) if callable(getattr(Trainer, name)) and not name.startswith("__")}
    return {name for name in theirs | _methods_of_trl(own.__name__) if not hasattr(own, name)}


def _never_called(place: str, name: str) -> OptionError:
    instead = next((text for part, text in _INSTEAD.items() if re.search(part, name)), _OTHERWISE)
    return OptionError(f"{place}: never called, so it would be ignored; {instead}")


def _further(trainer: type) -> Iterator[type]:
    """Yield the classes of a trainer that do not belong to this package."""
    return (kind for kind in trainer.__mro__ if not _is_ours(kind) and kind is not object)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("alignment.")


@functools.cache
def _methods_of_trl(name: str) -> set[str]:
    """Return the methods of TRL's trainer of a name, read from its source; empty if TRL is not installed."""
    spec = find_spec("trl")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    texts = [file.read_text(encoding="utf-8") for folder in folders for file in folder.rglob("*_trainer.py")]
    found = (
        re.findall(r"^    def (\w+)\(", text, re.M) for text in texts if re.search(rf"^class {name}\(", text, re.M)
    )
    return {method for methods in found for method in methods if not method.startswith("__")}
