"""Run transformers' callbacks and combine their requests into one decision on all ranks."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
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

from alignment.config.errors import OptionError, RewardError, TrainingError, did_you_mean, listing, one_line, setting
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import largest_numbers, on_first_rank
from alignment.internals.transformers import callback_handler, keeps_state
from alignment.run.ranks import world_size
from alignment.run.stop import REQUESTS, StopReason

_CHECKED_AS = {"azure_ml": "azureml", "comet_ml": "comet", "flyte": "flytekit"}  # in is_…_available()
# In the order of Decision.
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Decision(NamedTuple):
    """What is requested between two steps, the same on every rank; ``leave`` stops the run, to be resumed later."""

    stop: bool = False
    end_epoch: bool = False
    save: bool = False
    evaluate: bool = False
    log: bool = False
    leave: StopReason | None = None


def check_reporting(report_to: str | list[str]) -> None:
    """Check that the integrations in ``report_to`` exist and that their packages are installed.

    Without its package, transformers' callback raises when it is created, and once more when it is deleted.

    Raises:
        OptionError: if an integration is not available.
    """
    known = {*integrations.INTEGRATION_TO_CALLBACK} - {"trackio"}
    for name in {*([report_to] if isinstance(report_to, str) else report_to)} - {"all", "none"}:
        if name not in known:
            near = did_you_mean(name, known) or f"; set one of {listing(sorted(known))}"
            raise OptionError(f"{setting('report_to', name)}: unknown integration{near}")
        if not getattr(integrations, f"is_{_CHECKED_AS.get(name, name)}_available")():
            raise OptionError(
                f"{setting('report_to', name)}: requires its package, and that no environment variable disables it; "
                "install the package, or set report_to to none"
            )


def check_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks as a list of instances or classes; OptionError if one is neither."""
    given = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks is not None else []
    for callback in given:
        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            raise OptionError(
                f"callbacks: {kind.__name__} is not a transformers TrainerCallback; derive it from TrainerCallback"
            )
    return given


def check_before_loading(args: AlignmentConfig, callbacks: Sequence[TrainerCallback]) -> None:
    """Check the metric of early stopping, and log in to W&B: callbacks do so after models are loaded. Collective."""
    stops = any(isinstance(callback, EarlyStoppingCallback) for callback in callbacks)
    if stops and (args.metric_for_best_model is None or args.eval_strategy == "no"):
        raise OptionError(
            "callbacks: EarlyStoppingCallback requires metric_for_best_model (for example loss) and eval_strategy "
            "steps or epoch; set both"
        )
    online = os.environ.get("WANDB_MODE", "online") == "online"
    if online and any(isinstance(callback, integrations.WandbCallback) for callback in callbacks):
        import wandb

        on_first_rank(lambda: None if wandb.run is not None else wandb.login(verify=False))


class EarlyStopping(EarlyStoppingCallback):
    """transformers' callback, which warns of evaluation sets without the metric; they are ignored here."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, float], **kwargs: Any) -> None:
        """Compare the metric with the best so far."""
        if f"eval_{args.metric_for_best_model.removeprefix('eval_')}" in metrics:
            super().on_evaluate(args, state, control, metrics, **kwargs)


class Events:
    """Notify callbacks of a run's events; ``control`` holds their requests. Raises OptionError for ``report_to``."""

    def __init__(
        self, args: AlignmentConfig, state: TrainerState, callbacks: Sequence[Any], processing_class: Any
    ) -> None:
        self.args, self.state, self.control = args, state, TrainerControl()
        names = [args.report_to] if isinstance(args.report_to, str) else args.report_to
        if "all" in names:  # Trackio's callback reads options that only transformers' TrainingArguments have
            names = [name for name in integrations.get_available_reporting_integrations() if name != "trackio"]
        try:
            kinds = integrations.get_reporting_integration_callbacks([name for name in names if name != "none"])
            reporting = [kind() for kind in kinds]
        except Exception as error:  # the integrations' packages have their own exception classes
            raise OptionError(f"{setting('report_to', args.report_to)}: {one_line(error)}") from error
        for callback in reporting:
            if isinstance(callback, integrations.TensorBoardCallback) and args.logging_dir is not None:
                callback.logging_dir = os.path.expanduser(args.logging_dir)
        patience, threshold = args.early_stopping_patience, args.early_stopping_threshold
        own = [] if patience is None else [EarlyStopping(patience, threshold)]
        self.handler = callback_handler([DefaultFlowCallback(), *own, *reporting, *callbacks], processing_class)

    def __call__(self, event: str, **kwargs: Any) -> None:
        """Notify every callback of ``event``, such as ``on_step_end``; an evaluation that it starts is not cut."""
        before, REQUESTS.may_cut = REQUESTS.may_cut, False
        try:
            self.control = getattr(self.handler, event)(self.args, self.state, self.control, **kwargs)
        except RewardError as error:  # after which a run saves a checkpoint, but the step may be half-done
            raise TrainingError(f"{event}: {error}") from error
        finally:
            REQUESTS.may_cut = before

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

    def why_stopped(self) -> str:
        """Return why callbacks ended the run before its last step, for the user."""
        found = [one for one in self.handler.callbacks if isinstance(one, EarlyStoppingCallback)]
        for one in (one for one in found if one.early_stopping_patience_counter >= one.early_stopping_patience):
            more = f" by more than {one.early_stopping_threshold:g}" if one.early_stopping_threshold else ""
            patience = setting("early_stopping_patience", one.early_stopping_patience)
            return f"early stopping, {self.args.metric_for_best_model} has not improved{more} ({patience})"
        return "a callback requested it"

    def save_state(self) -> None:
        """Store the callbacks' own states in the trainer's state by class; a list for several of one class."""
        states: dict[str, list[dict[str, Any]]] = {}
        for part in self._stateful():
            states.setdefault(type(part).__name__, []).append(part.state())
        self.state.stateful_callbacks = {n: each[0] if len(each) == 1 else each for n, each in states.items()}

    def _stateful(self) -> list[Any]:
        return [part for part in (self.control, *self.handler.callbacks) if keeps_state(part)]

    def state_dict(self) -> dict[str, Any]:
        """Return transformers' state including that of callbacks, without the fields that identify the rank."""
        self.save_state()
        return {name: value for name, value in asdict(self.state).items() if not name.endswith("process_zero")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict` in place."""
        for name, value in state.items():
            setattr(self.state, name, copy.deepcopy(value))
        saved = self.state.stateful_callbacks
        left = {name: list(each) if isinstance(each, list) else [each] for name, each in saved.items()}
        for part in self._stateful():
            own = each.pop(0) if (each := left.get(type(part).__name__)) else {}
            given = own.get("attributes", {}) | (own.get("args", {}) if part is self.control else {})
            for attribute, value in given.items():
                setattr(part, attribute, value)
