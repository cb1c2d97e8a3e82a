"""The options shared by all methods, and the properties that callbacks read.

Options are standard dataclasses, composed of sections and validated by pydantic (:mod:`alignment.config.fields`),
not transformers' ``TrainingArguments``: nothing here initializes devices or processes. Creating an object converts the
values, resolves those that depend on others, and checks them, once. A trainer works on a copy that is sealed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

from alignment.compat.trl.names import older_names, read_names, value_here
from alignment.compat.trl.table import TransformersOptions
from alignment.compat.trl.verdicts import judged_names, refuse_values, verdict_of
from alignment.config import checks, dtypes
from alignment.config.elsewhere import check_elsewhere
from alignment.config.errors import OptionError, setting, without_secrets
from alignment.config.fields import EARLY, LATE, Free, default_of, hide_shared, marked, option_fields, validated
from alignment.config.options_data import DataOptions
from alignment.config.options_model import AdapterOptions, ModelOptions, PrecisionOptions, read_keywords
from alignment.config.options_training import (
    FaultOptions,
    LoggingOptions,
    MemoryOptions,
    SavingOptions,
    TrainingOptions,
)
from alignment.config.process_facts import ProcessFacts
from alignment.config.registry import Paper, check_names, name_of, option_names

# Attributes of options: whether they are as they were resolved, and of a trainer's options, which may still be set.
_RESOLVED, _OPEN = "_resolved", "_open"


def _is_greater_better(metric: str | None) -> bool | None:
    return None if metric is None else not metric.endswith("loss")


def _copied(value: Any) -> Any:
    """Copy the lists and mappings of a value; other objects are not copied."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


@dataclass(kw_only=True)
class AlignmentConfig(
    FaultOptions,
    SavingOptions,
    LoggingOptions,
    AdapterOptions,
    MemoryOptions,
    PrecisionOptions,
    TrainingOptions,
    DataOptions,
    ModelOptions,
    TransformersOptions,
    ProcessFacts,
):
    """Base class of the options of all methods. Use a method's class, such as ``KTOConfig`` or ``CPOConfig``.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or an invalid value.
    """

    TITLE: ClassVar[str] = "Output"
    method: ClassVar[str] = ""
    # Papers that a model card cites: "" for the method, and by loss type those of a loss.
    PAPERS: ClassVar[Mapping[str, Paper]] = {}
    # TRL's defaults where they differ, for the reference page on TRL's options.
    TRL_DEFAULTS: ClassVar[Mapping[str, str]] = {"optim": "adamw_torch_fused"}

    output_dir: Free[str | None] = dataclasses.field(
        default=None, kw_only=False, metadata={"help": "Folder for the model, checkpoints, logs and resolved options."}
    )

    if not TYPE_CHECKING:

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            cls.__init__ = vars(cls).get("__init__", AlignmentConfig.__init__)  # which ``@dataclass`` keeps

        def __init__(self, output_dir: Any = None, **given: Any) -> None:
            cls = type(self)
            if given.get("method") == cls.method:  # as in to_dict()
                del given["method"]
            check_names(cls, given)
            given = read_names(cls, {"output_dir": output_dir, **given})
            for field in option_fields(cls):
                if field.default_factory is not dataclasses.MISSING:
                    given.setdefault(field.name, field.default_factory())
                elif field.default is dataclasses.MISSING and field.name not in given:
                    raise OptionError(f"{field.name} is required; set it")
                vars(self)[field.name] = default_of(field)
            vars(self).update(validated(cls, {name: value_here(name, value) for name, value in given.items()}))
            self.__post_init__()
            vars(self)[_RESOLVED] = True

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an option, by its older name too. The options of a trainer refuse those that it has read."""
            name = older_names(type(self)).get(name, name)
            still_open = vars(self).get(_OPEN)
            if still_open is not None and name in option_names(type(self)):
                if name not in still_open:
                    read = "built its engines" if name in marked(type(self), EARLY) else "was created"
                    raise OptionError(
                        f"{setting(name, value)}: too late to take effect after the trainer {read}; set options "
                        "before, or create a new trainer"
                    )
                value = validated(type(self), {name: value_here(name, value)})[name]
            if name == "metric_for_best_model" and self.greater_is_better == _is_greater_better(getattr(self, name)):
                vars(self)["greater_is_better"] = _is_greater_better(value)
            super().__setattr__(name, value)
            vars(self)[_RESOLVED] = False

    def __post_init__(self) -> None:
        self._resolve()
        self._check_all()

    def _resolve(self) -> None:
        if "LOCAL_RANK" in os.environ:  # like transformers: scripts test for local_rank 0
            self.local_rank = self.local_process_index
        if self.output_dir is None:
            self.output_dir = "trainer_output"  # transformers' default
        for name in ("output_dir", "merged_output_dir"):  # a shell does not expand `~` in `--output_dir=~/runs`
            given = getattr(self, name)
            setattr(self, name, given if given is None else os.path.expanduser(given))
        read_keywords(self)
        if self.per_device_eval_batch_size is None:
            self.per_device_eval_batch_size = self.per_device_train_batch_size
        if self.padding_free and self.pack == "auto":
            self.pack = "true"
        if self.eval_steps is None:
            self.eval_steps = self.logging_steps
        self._name_best_metric()
        self.resolve()

    def _name_best_metric(self) -> None:
        follows = self.load_best_model_at_end or self.save_strategy == "best" or self.early_stopping_patience
        if self.metric_for_best_model is None and follows:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None:
            self.greater_is_better = _is_greater_better(self.metric_for_best_model)

    def _check_all(self) -> None:
        refuse_values(self)
        checks.check_shared(self)
        check_elsewhere(self)
        self.check()

    def resolve(self) -> None:
        """Resolve the method's own options that depend on each other.

        Called when the options are created, and by a trainer only if options were set since.
        """

    def check(self) -> None:
        """Check combinations of the method's own options, without changing them."""

    def check_named(self) -> None:
        """Require the options that a script may pass as objects instead."""

    def sealed(self) -> Self:
        """Return a copy for a trainer, of which only options that it has not read yet can be set.

        Options that were set since this object was created are converted, resolved and checked.

        Raises:
            OptionError: one of them is invalid.
        """
        cls, result = type(self), copy.copy(self)
        vars(result).pop(_OPEN, None)
        values = {field.name: _copied(getattr(self, field.name)) for field in option_fields(self)}
        vars(result).update(validated(cls, {name: value_here(name, value) for name, value in values.items()}))
        if vars(self)[_RESOLVED]:
            read_keywords(result)  # a mapping may have changed
        else:
            result._resolve()  # noqa: SLF001
        result._check_all()  # noqa: SLF001
        vars(result)[_OPEN] = marked(cls, LATE) | marked(cls, EARLY) | judged_names(cls)
        return result

    def check_late(self) -> None:
        """Check the options of a trainer that trains, some of which may have been set since it was created."""
        self._name_best_metric()
        self._check_all()

    def engines_built(self) -> None:
        """Refuse from now on the options that engines are built with."""
        if _OPEN in vars(self):
            vars(self)[_OPEN] -= marked(type(self), EARLY)

    @property
    def window_size(self) -> int:
        """Number of rows of an optimizer step, over all ranks."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    train_batch_size = property(lambda self: self.per_device_train_batch_size, doc="Rows of a micro-batch here.")

    @property
    def eval_batch_size(self) -> int:
        """Number of rows of an evaluation batch on this device."""
        return self.per_device_eval_batch_size or self.per_device_train_batch_size

    # The compute dtype according to options and machine, but not the DeepSpeed JSON.
    resolved_bf16 = property(lambda self: dtypes.compute_dtype(self) == "bfloat16", doc="Whether it is bfloat16.")
    resolved_fp16 = property(lambda self: dtypes.compute_dtype(self) == "float16", doc="Whether it is float16.")

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the number of warmup steps; a fraction of the training steps is rounded up, as in transformers."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * (self.warmup_steps or self.warmup_ratio))

    def to_dict(self) -> dict[str, Any]:
        """Return all options as plain values, ``method`` first, with secrets replaced by their names."""
        values: dict[str, Any] = {"method": name_of(self)}
        for field in option_fields(self):
            value = getattr(self, field.name)
            if field.name == "local_rank" or (verdict_of(field) is not None and value == field.default):
                continue  # process state, or an option of another library without effect that is not set
            values[field.name] = without_secrets(field.name, value)
        return values

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return :meth:`to_dict` with values that metrics stores accept: booleans, numbers and strings."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in values.items()}

    def to_json_string(self) -> str:
        """Return :meth:`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)


hide_shared(AlignmentConfig)
