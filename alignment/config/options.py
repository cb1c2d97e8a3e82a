"""The options that all methods share, and what callbacks read from them.

These are our own dataclasses, not transformers' ``TrainingArguments``: nothing here builds device or process state.
Every field is read outside this package or is refused by :mod:`alignment.config.refusals`.
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

_OUTPUT_DIR = "trainer_output"  # as transformers calls it
_GIVEN, _SETTLED = "_given", "_settled"  # on options: their values before and after they were made of each other


def _environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"{name}={text!r}: the launcher's variable must be a whole number; unset it") from None


def _held(value: Any) -> Any:
    """A value that later changes of its lists and mappings leave alone; what these hold is not copied."""
    if isinstance(value, dict):
        return {key: _held(each) for key, each in value.items()}
    return [_held(each) for each in value] if isinstance(value, list) else value


class _ByName(type):
    """Reads names before the generated ``__init__``, whose TypeError could not say what an option is called here."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **given: Any) -> Any:
            if given.get("method") == cls.method:  # as to_dict() says it
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
    """What every method has. Use a method's class (``KTOConfig``, ``CPOConfig``), not this one.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or one that cannot be used.
    """

    TITLE: ClassVar[str] = "Output"
    method: ClassVar[str] = ""
    # What a model card cites: "" for the method, and a loss type for what that loss adds or replaces.
    PAPERS: ClassVar[Mapping[str, Paper]] = {}
    # TRL's defaults where they are others than here, for the page on coming from there.
    TRL_DEFAULTS: ClassVar[Mapping[str, str]] = {"optim": "adamw_torch_fused"}

    output_dir: str | None = dataclasses.field(
        default=None, kw_only=False, metadata={"help": "Folder for the model, the log and the resolved settings."}
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
            """An option by its older name."""
            here = older_names(type(self)).get(name)
            if here is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self, here)

    def values(self) -> dict[str, Any]:
        """Every option by name, as it is now."""
        return {field.name: _held(getattr(self, field.name)) for field in option_fields(self)}

    def check_again(self) -> None:
        """Take over what was set since the options were made, as if it had been given then.

        Raises:
            OptionError: it cannot be used.
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
        """Convert and check every option, and make those that depend on others."""
        for field in option_fields(self):
            setattr(self, field.name, value_here(field.name, getattr(self, field.name)))
        convert_options(self)
        if "LOCAL_RANK" in os.environ:  # as transformers does: scripts let local_rank 0 write
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
        """`~` in folders that are written, which `--output_dir=~/runs` leaves to the program."""
        for name in ("output_dir", "merged_output_dir"):
            given = getattr(self, name)
            setattr(self, name, given if given is None else os.path.expanduser(given))

    def resolve(self) -> None:
        """Check the method's own options, and fill those that depend on each other."""

    def check_named(self) -> None:
        """Check what a script may give as objects, but the command line has to name."""

    @property
    def window_size(self) -> int:
        """Rows of one optimizer step, over all ranks."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size

    @property
    def train_batch_size(self) -> int:
        """Rows of one micro-batch on this device."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Rows of one evaluation batch on this device."""
        return self.per_device_eval_batch_size or self.per_device_train_batch_size

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return _environment_int("RANK", 0)

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return _environment_int("LOCAL_RANK", 0)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        machine = planned()
        return _environment_int("WORLD_SIZE", 1) if machine is None else machine.ranks

    @property
    def n_gpu(self) -> int:
        """GPUs of this process: 1 or 0."""
        return int(dtypes.uses_cuda(self))

    @property
    def parallel_mode(self) -> Any:
        """transformers' ``ParallelMode``; only asked by callbacks, when transformers is loaded already."""
        if self.world_size > 1:
            return parallel_mode("DISTRIBUTED")
        return parallel_mode("NOT_DISTRIBUTED" if self.n_gpu else "NOT_PARALLEL")

    @property
    def resolved_bf16(self) -> bool:
        """Whether these options and this machine, without a DeepSpeed JSON, give bfloat16."""
        return dtypes.compute_dtype(self) == "bfloat16"

    @property
    def resolved_fp16(self) -> bool:
        """Whether these options give float16."""
        return dtypes.compute_dtype(self) == "float16"

    def to_dict(self) -> dict[str, Any]:
        """All options as plain values, with ``method`` first; a secret is replaced by its name."""
        values: dict[str, Any] = {"method": name_of(self)}
        for field in option_fields(self):
            value = getattr(self, field.name)
            if field.name == "local_rank" or (verdict_of(field) is not None and value == field.default):
                continue  # of another library, without effect, and not set; or the process's own
            values[field.name] = without_secrets(field.name, value.value if isinstance(value, Enum) else value)
        return values

    def to_sanitized_dict(self) -> dict[str, Any]:
        """The same with values that a metrics store takes: truth values, numbers and texts."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in values.items()}

    def to_json_string(self) -> str:
        """The same as indented JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)
