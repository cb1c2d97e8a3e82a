"""The options shared by all methods, and the properties that callbacks read.

These are dataclasses of this project, not transformers' ``TrainingArguments``: nothing here initializes devices or
processes. Every field is read outside this package or rejected by :mod:`alignment.config.refusals`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from alignment.config import checks, dtypes, refusals
from alignment.config.compatibility.model_kwargs import read_keywords
from alignment.config.compatibility.names import older_names, read_names, value_here
from alignment.config.compatibility.training_arguments import TransformersOptions
from alignment.config.compatibility.verdicts import refuse_values, verdict_of
from alignment.config.dtypes import planned
from alignment.config.errors import OptionError, without_secrets
from alignment.config.fields import SaveStrategy, convert_options, keeping_shared, option_fields
from alignment.config.options_data import DataOptions
from alignment.config.options_faults import FaultOptions
from alignment.config.options_model import AdapterOptions, ModelOptions, PrecisionOptions
from alignment.config.options_training import LoggingOptions, MemoryOptions, SavingOptions, TrainingOptions
from alignment.config.process.facts import ProcessFacts
from alignment.config.registry import Paper, name_of
from alignment.config.translated import accelerate, sections
from alignment.internals.transformers import parallel_mode

_OUTPUT_DIR = "trainer_output"  # transformers' default
_GIVEN, _SETTLED = "_given", "_settled"  # attributes with the values before and after options were resolved


def _environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"environment variable {name}={text!r}: expected an integer; unset it") from None


def _held(value: Any) -> Any:
    """Copy the lists and mappings of a value, so that later changes of them have no effect; items are not copied."""
    if isinstance(value, dict):
        return {key: _held(each) for key, each in value.items()}
    return [_held(each) for each in value] if isinstance(value, list) else value


class _ByName(type):
    """Checks names before the generated ``__init__``, whose TypeError could not suggest the right name."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **given: Any) -> Any:
            if given.get("method") == cls.method:  # as in to_dict()
                del given["method"]
            refusals.check_names(cls, given)
            return super().__call__(*args, **read_names(cls, given))


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
    metaclass=_ByName,
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

    output_dir: str | None = dataclasses.field(
        default=None, kw_only=False, metadata={"help": "Folder for the model, checkpoints, logs and resolved options."}
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__post_init__" in vars(cls):
            cls.__post_init__ = keeping_shared(vars(cls)["__post_init__"])  # type: ignore[method-assign]

    @keeping_shared
    def __post_init__(self) -> None:
        vars(self)[_GIVEN] = self.values()
        self._settle()
        vars(self)[_SETTLED] = self.values()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an option by its older name."""
            here = older_names(type(self)).get(name)
            if here is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self, here)

    def values(self) -> dict[str, Any]:
        """Return the current values of all options by name."""
        return {field.name: _held(getattr(self, field.name)) for field in option_fields(self)}

    def check_again(self) -> None:
        """Check and resolve the options again if any were set after construction.

        Raises:
            OptionError: a new value is invalid.
        """
        settled, now = vars(self)[_SETTLED], self.values()
        changed = {name: value for name, value in now.items() if value != settled[name]}
        older = {name: vars(self)[name] for name in older_names(type(self)) if name in vars(self)}
        if not changed and not older:
            return
        fresh = copy.copy(self)
        vars(fresh).update({**vars(self)[_GIVEN], **read_names(type(self), {**changed, **older})})
        AlignmentConfig.__post_init__(fresh)
        for name in older:
            del vars(self)[name]
        vars(self).update({name: value for name, value in vars(fresh).items() if name not in older})

    def _settle(self) -> None:
        """Convert and check all options, and resolve those that depend on others."""
        for field in option_fields(self):
            setattr(self, field.name, value_here(field.name, getattr(self, field.name)))
        convert_options(self)
        if "LOCAL_RANK" in os.environ:  # like transformers: scripts test for local_rank 0
            self.local_rank = self.local_process_index
        if self.output_dir is None:
            self.output_dir = _OUTPUT_DIR
        accelerate.translate(self)
        sections.translate(self)
        self._expand_folders()
        refusals.refuse_not_yet(self)
        refuse_values(self)
        read_keywords(self)
        checks.check_shared(self)
        if self.per_device_eval_batch_size is None:
            self.per_device_eval_batch_size = self.per_device_train_batch_size
        if self.eval_steps is None:
            self.eval_steps = self.logging_steps
        chooses = self.load_best_model_at_end or self.save_strategy == SaveStrategy.BEST
        if chooses and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        self.resolve()

    def _expand_folders(self) -> None:
        """Expand `~` in output folders, which a shell does not do in `--output_dir=~/runs`."""
        for name in ("output_dir", "merged_output_dir"):
            given = getattr(self, name)
            setattr(self, name, given if given is None else os.path.expanduser(given))

    def resolve(self) -> None:
        """Check the method's own options, and resolve those that depend on each other."""

    def check_named(self) -> None:
        """Require the options that a script may pass as objects instead."""

    @property
    def window_size(self) -> int:
        """Number of rows of an optimizer step, over all ranks."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def train_batch_size(self) -> int:
        """Number of rows of a micro-batch on this device."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Number of rows of an evaluation batch on this device."""
        return self.per_device_eval_batch_size or self.per_device_train_batch_size

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return _environment_int("RANK", 0)

    @property
    def local_process_index(self) -> int:
        """Local rank of this process on its host."""
        return _environment_int("LOCAL_RANK", 0)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        machine = planned()
        return _environment_int("WORLD_SIZE", 1) if machine is None else machine.ranks

    @property
    def n_gpu(self) -> int:
        """Number of GPUs of this process: 1 or 0."""
        return int(dtypes.uses_cuda(self))

    @property
    def parallel_mode(self) -> Any:
        """transformers' ``ParallelMode``, for callbacks; transformers must be imported already."""
        if self.world_size > 1:
            return parallel_mode("DISTRIBUTED")
        return parallel_mode("NOT_DISTRIBUTED" if self.n_gpu else "NOT_PARALLEL")

    @property
    def resolved_bf16(self) -> bool:
        """Whether the compute dtype is bfloat16, according to options and machine but not the DeepSpeed JSON."""
        return dtypes.compute_dtype(self) == "bfloat16"

    @property
    def resolved_fp16(self) -> bool:
        """Whether the compute dtype is float16, according to options and machine but not the DeepSpeed JSON."""
        return dtypes.compute_dtype(self) == "float16"

    def to_dict(self) -> dict[str, Any]:
        """Return all options as plain values, ``method`` first, with secrets replaced by their names."""
        values: dict[str, Any] = {"method": name_of(self)}
        for field in option_fields(self):
            value = getattr(self, field.name)
            if field.name == "local_rank" or (verdict_of(field) is not None and value == field.default):
                continue  # process state, or an option of another library without effect that is not set
            values[field.name] = without_secrets(field.name, value.value if isinstance(value, Enum) else value)
        return values

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return :meth:`to_dict` with values that metrics stores accept: booleans, numbers and strings."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in values.items()}

    def to_json_string(self) -> str:
        """Return :meth:`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)
