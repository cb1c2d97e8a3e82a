"""Refuse subclasses that override methods of transformers' and TRL's trainers that are never called here."""

from __future__ import annotations

import re
from collections.abc import Iterable

from alignment.config.errors import OptionError

# Methods of TRL's trainers beside those of transformers' Trainer.
_OF_TRL = re.compile(
    r"(kto|cpo|dpo)_loss|get_batch_\w+|concatenated_\w+|compute_ref\w+|(tokenize|process)_row|store_metrics|forward|"
    r"_(prepare_dataset|tokenize|generate|forward|compute_loss)"
)
# What takes the place of a method, by a part of its name.
_INSTEAD = {
    "optimizer|decay_param|learning_rate": "pass optimizers=(optimizer, scheduler), or set optim and learning_rate",
    "scheduler": "pass optimizers=(optimizer, scheduler), or set lr_scheduler_type and lr_scheduler_kwargs",
    "loss|step|forward|logps|log_probs": "derive a Method and override losses(), see docs/guides/extending.md",
    "sampler|dataloader|batch_samples|batch_size": "set data_seed or max_tokens_per_batch, or sort the dataset",
    "dataset|token|column|row": "map the dataset before passing it, or set column_map",
    "save|load|checkpoint": "use a TrainerCallback with on_save",
    "": "use a TrainerCallback, options, or a Method of your own, see docs/guides/extending.md",
}


def check_overrides(trainer: type) -> None:
    """Refuse a trainer whose class overrides a method that is never called.

    Raises:
        OptionError: naming the first such method, and the alternative.
    """
    for kind in _further(trainer):
        _refuse(trainer, kind.__name__, (name for name, value in vars(kind).items() if callable(value)))


def check_saving(trainer: type, saves: bool) -> None:
    """Refuse a trainer whose class overrides ``save_model`` if checkpoints are written, which do not call it.

    Raises:
        OptionError: if checkpoints are written and the class overrides it.
    """
    instead = "use a TrainerCallback with on_save, or set save_strategy: no and call save_model yourself"
    for kind in _further(trainer):
        if saves and "save_model" in vars(kind):
            raise OptionError(f"{kind.__name__}.save_model: checkpoints do not call it, so they lack it; {instead}")


def check_attributes(trainer: object) -> None:
    """Refuse a trainer instance on which such a method was set, as in ``trainer.compute_loss = own``.

    Raises:
        OptionError: naming the method and the alternative.
    """
    libraries = ("alignment", "transformers", "torch")  # of whose objects, some are callable: the tokenizer, the model
    given = {name: type(value).__module__ for name, value in vars(trainer).items() if callable(value)}
    own = [name for name, module in given.items() if module.partition(".")[0] not in libraries]
    _refuse(type(trainer), "trainer", own)


def _refuse(trainer: type, place: str, names: Iterable[str]) -> None:
    """Refuse methods of other libraries' trainers that the trainer of this package lacks."""
    ours = next(kind for kind in trainer.__mro__ if kind.__module__.startswith("alignment."))
    for name in names:
        if hasattr(ours, name):
            continue
        from transformers import Trainer  # takes a second, and few scripts derive or modify a trainer

        if callable(getattr(Trainer, name, None)) or _OF_TRL.fullmatch(name):
            instead = next(text for part, text in _INSTEAD.items() if re.search(part, name))
            raise OptionError(f"{place}.{name}: never called, so it would be ignored; {instead}")


def _further(trainer: type) -> list[type]:
    """Return the classes of a trainer that do not belong to this package."""
    return [kind for kind in trainer.__mro__ if not kind.__module__.startswith("alignment.") and kind is not object]
