"""The arguments of a trainer's constructor that are not options: tokenizer, datasets, and those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.config.refusals import shown
from alignment.models.source import ModelSource
from alignment.trainers.named_data import NamedMixture, NamedSplit

_REFUSED = {
    "data_collator": "batches are planned over the whole window; give token lengths by max_length instead",
    "model_init": "not supported yet; pass the model itself",
    "compute_metrics": "not supported yet; the metrics of the method are logged",
    "preprocess_logits_for_metrics": "no logits exist: log-probs are computed without them",
    "peft_config": "adapters are not supported yet; train the whole model",
    "model_adapter_name": "adapters are not supported yet; train the whole model",
    "ref_adapter_name": "adapters are not supported yet; pass ref_model",
}


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Refuse TRL's arguments that do nothing here, unless they are None.

    Raises:
        OptionError: one is set.
        TypeError: one is unknown, as Python does.
    """
    for name, value in arguments.items():
        if name not in _REFUSED:
            raise TypeError(f"unexpected keyword argument {name!r}")
        if value is not None:
            raise OptionError(f"{name}: {_REFUSED[name]}")


def model_and_options(
    trainer: str,
    kind: type[AlignmentConfig],
    model: str | PreTrainedModel | None,
    args: AlignmentConfig | None,
) -> tuple[str | PreTrainedModel, AlignmentConfig]:
    """The model and the options of a trainer, each of which can stand in for the other.

    Args:
        trainer: name of the trainer's class, for messages.
        kind: the class of its options.
        model: path, hub name or live model; None takes ``args.model_name_or_path``.
        args: the options; None takes the defaults, and a folder named after model and method.

    Raises:
        OptionError: options of another method, no model, or no folder.
    """
    if args is not None and not isinstance(args, kind):
        raise OptionError(f"args: {trainer} needs a {kind.__name__}, not {type(args).__name__}")
    model = model if model is not None else args.model_name_or_path if args is not None else None
    if model is None:
        raise OptionError(f"model: {trainer} got none; pass a path or a model, or set model_name_or_path")
    if args is None:
        source = model if isinstance(model, str) else model.config.name_or_path
        args = kind(output_dir=f"{Path(source).name or 'model'}-{kind.method.upper()}")
    if not args.output_dir:
        raise OptionError("output_dir: not set; name the folder for the model and the log")
    return model, args


def check_data_source(args: AlignmentConfig | None, train_dataset: Any) -> None:
    """Refuse a dataset that is given twice: as an object and by an option, which would then do nothing.

    Raises:
        OptionError: both are there.
    """
    if args is None or train_dataset is None or isinstance(train_dataset, (NamedSplit, NamedMixture)):
        return
    for name in ("dataset_name", "dataset_mixture"):
        if getattr(args, name) is not None:
            raise OptionError(f"{shown(name, getattr(args, name))}: train_dataset was given as well; leave one out")


def check_optimizers(optimizers: tuple[Any, Any], model: Any) -> None:
    """Refuse an optimizer without its model, and a schedule without its optimizer.

    Raises:
        OptionError: they could not act on what is trained.
    """
    optimizer, schedule = optimizers
    if optimizer is not None and isinstance(model, str):
        raise OptionError("optimizers: they need a live model; pass the model object that they were made for")
    if schedule is not None and (optimizer is None or schedule.optimizer is not optimizer):
        raise OptionError("optimizers: the schedule steps another optimizer; pass the one that it was made for")


def load_tokenizer(given: Any, older_name: Any, policy: ModelSource, options: AlignmentConfig) -> Any:
    """The tokenizer that was given, or the policy's own.

    Raises:
        OptionError: two different ones were given.
        ModelError: the model's folder has none, or it is not a tokenizer.
    """
    if given is not None and older_name is not None and given is not older_name:
        raise OptionError("tokenizer: processing_class was given as well; leave the older name out")
    tokenizer = given if given is not None else older_name
    return policy.tokenizer(tokenizer, "processing_class", options.trust_remote_code)


def named_datasets(value: Any) -> dict[str, Any]:
    """None, one dataset, or a dict of several -> datasets by name; a single one is called ``""``."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return dict(value)
    return {"": value}
