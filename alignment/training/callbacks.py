"""Run transformers' callbacks and combine their requests into one decision on all ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from transformers import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    integrations,
)
from transformers.integrations import (
    INTEGRATION_TO_CALLBACK,
    TensorBoardCallback,
    WandbCallback,
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)

from alignment.config.errors import (
    OptionError,
    RewardError,
    TrainingError,
    did_you_mean,
    listing,
    one_line,
    setting,
)
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import largest_numbers, on_first_rank
from alignment.internals.transformers import callback_handler, keeps_state
from alignment.run.ranks import world_size
from alignment.run.requests import REQUESTS
from alignment.run.stop import StopReason

_PACKAGES = {  # integrations whose package, or whose function that looks for it, has another name
    "azure_ml": ("azureml", "azureml-sdk"),
    "comet_ml": ("comet", "comet-ml"),
    "flyte": ("flytekit", "flytekit"),
}
# In the order of Decision.
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Decision(NamedTuple):
    """What happens between two steps, the same on every rank; if all fields are unset, training continues.

    ``leave`` is a request to stop the run, to be resumed later; all other fields are requests of callbacks.
    """

    stop: bool = False
    end_epoch: bool = False
    save: bool = False
    evaluate: bool = False
    log: bool = False
    leave: StopReason | None = None


def _integrations(report_to: str | list[str]) -> list[str]:
    """Return the names of the integrations in ``report_to``; ``all`` selects those that are installed."""
    names = [report_to] if isinstance(report_to, str) else report_to
    if "all" in names:
        # Trackio's callback reads options that only transformers' TrainingArguments have.
        names = [name for name in get_available_reporting_integrations() if name != "trackio"]
    return [name for name in names if name != "none"]


def check_reporting(report_to: str | list[str]) -> None:
    """Check that the integrations in ``report_to`` exist and are installed, before anything is loaded.

    A callback that is created without its package raises, and once more when it is deleted.

    Raises:
        OptionError: if an integration is not available.
    """
    known = {*INTEGRATION_TO_CALLBACK} - {"trackio"}
    for name in _integrations(report_to):
        if name not in known:
            near = did_you_mean(name, known) or f"; set one of {listing(sorted(known))}"
            raise OptionError(f"{setting('report_to', name)}: unknown integration{near}")
        short, package = _PACKAGES.get(name, (name, name))
        if getattr(integrations, f"is_{short}_available")():
            continue
        need = f"requires {package}; run pip install {package}"
        if name == "kubeflow":
            need = "requires a Kubeflow TrainJob, which sets KUBEFLOW_TRAINER_SERVER_URL; start the run in one"
        elif os.environ.get(f"DISABLE_{name.upper()}_INTEGRATION", "").upper() == "TRUE":
            need = f"DISABLE_{name.upper()}_INTEGRATION=TRUE disables it; unset this environment variable"
        raise OptionError(f"{setting('report_to', name)}: {need}, or set report_to to none")


def check_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks as a list of instances or classes.

    Raises:
        OptionError: if one is neither.
    """
    given = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks is not None else []
    for callback in given:
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            raise OptionError(
                f"callbacks: {kind.__name__} is not a transformers TrainerCallback; derive it from TrainerCallback"
            )
    return given


def check_early_stopping(args: AlignmentConfig, callbacks: Sequence[TrainerCallback]) -> None:
    """Check early what transformers' EarlyStoppingCallback checks only after the models are loaded.

    Raises:
        OptionError: if it has no metric to follow.
    """
    if not any(isinstance(callback, EarlyStoppingCallback) for callback in callbacks):
        return
    if args.metric_for_best_model is None:
        raise OptionError(
            "callbacks: EarlyStoppingCallback requires metric_for_best_model; set it, for example to loss"
        )
    if args.eval_strategy == "no":
        raise OptionError("callbacks: EarlyStoppingCallback requires evaluation; set eval_strategy to steps or epoch")


def log_in(callbacks: Sequence[TrainerCallback]) -> None:
    """Log in to Weights & Biases before the models are loaded: it may fail, or ask for a key. Collective."""

    def ask() -> None:
        import wandb

        if wandb.run is None:
            wandb.login(verify=False)

    needed = any(isinstance(callback, WandbCallback) for callback in callbacks)
    if needed and os.environ.get("WANDB_MODE", "online") == "online":
        on_first_rank(ask)


class Events:
    """Notify the callbacks of the events of a run; ``control`` holds their requests.

    Args:
        args: the run's options.
        state: the trainer's state.
        callbacks: the user's callbacks, instances or classes.
        processing_class: the tokenizer, passed to callbacks.

    Raises:
        OptionError: if a reporting integration cannot be used.
    """

    def __init__(
        self, args: AlignmentConfig, state: TrainerState, callbacks: Sequence[Any], processing_class: Any
    ) -> None:
        self.args, self.state, self.control = args, state, TrainerControl()
        try:
            reporting = [kind() for kind in get_reporting_integration_callbacks(_integrations(args.report_to))]
        except Exception as error:  # the integrations' packages have their own exception classes
            raise OptionError(f"{setting('report_to', args.report_to)}: {one_line(error)}") from error
        for callback in reporting:
            if isinstance(callback, TensorBoardCallback) and args.logging_dir is not None:
                callback.logging_dir = os.path.expanduser(args.logging_dir)
        everyone = [DefaultFlowCallback(), *reporting, *callbacks]
        self.handler = callback_handler(everyone, processing_class)

    def __call__(self, event: str, **kwargs: Any) -> None:
        """Notify every callback of ``event``, such as ``on_step_end``; an evaluation that it starts is not cut."""
        before, REQUESTS.in_callback = REQUESTS.in_callback, True
        try:
            self.control = getattr(self.handler, event)(self.args, self.state, self.control, **kwargs)
        except RewardError as error:  # after which a run saves a checkpoint, but the step may be half-done
            raise TrainingError(f"{event}: {error}") from error
        finally:
            REQUESTS.in_callback = before

    def decide(self) -> Decision:
        """Return the combined requests of all ranks' callbacks, and copy them to ``control``. Collective."""
        leave = int(REQUESTS.asked(every=0.0) or 0)
        if world_size() > 1:
            own = [*(float(getattr(self.control, flag)) for flag in _FLAGS), float(leave)]
            *wanted, asked = largest_numbers(own)
            for flag, value in zip(_FLAGS, wanted, strict=True):
                setattr(self.control, flag, bool(value))
            leave = int(asked)
        flags = (bool(getattr(self.control, flag)) for flag in _FLAGS)
        return Decision._make((*flags, StopReason(leave) if leave else None))

    def save_state(self) -> None:
        """Store the callbacks' own states in the trainer's state by class; a list for several of one class."""
        states: dict[str, list[dict[str, Any]]] = {}
        for name, part in self._stateful():
            states.setdefault(name, []).append(part.state())
        self.state.stateful_callbacks = {n: each[0] if len(each) == 1 else each for n, each in states.items()}

    def _stateful(self) -> Iterator[tuple[str, Any]]:
        for part in (self.control, *self.handler.callbacks):
            if keeps_state(part):
                yield type(part).__name__, part

    def state_dict(self) -> dict[str, Any]:
        """Return transformers' state including that of callbacks, without the fields that identify the rank."""
        self.save_state()
        return {name: value for name, value in asdict(self.state).items() if not name.endswith("process_zero")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict` in place."""
        for name, value in state.items():
            setattr(self.state, name, copy.deepcopy(value))
        saved = {
            n: list(each) if isinstance(each, list) else [each] for n, each in self.state.stateful_callbacks.items()
        }
        for name, part in self._stateful():
            own = saved[name].pop(0) if saved.get(name) else {}
            given = own.get("attributes", {}) | (own.get("args", {}) if part is self.control else {})
            for attribute, value in given.items():
                setattr(part, attribute, value)
