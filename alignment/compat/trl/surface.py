"""Attributes and methods of transformers' and TRL's trainers that existing scripts use."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from huggingface_hub import CommitInfo
from torch import nn
from transformers import TrainerState

from alignment.compat.trl.accelerator import Accelerator
from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.references.engine import EngineReference
from alignment.reporting.durable import write_json
from alignment.run.ranks import local_rank, rank
from alignment.training.callbacks import Events, check_callbacks
from alignment.training.context import RunContext
from alignment.training.data import PreparedData, RunData, total_steps
from alignment.training.hub.repository import prepared_repository
from alignment.training.hub.uploads import Uploads
from alignment.training.method import AnyMethod
from alignment.training.preparation import PlannedModels
from alignment.training.run_engines import RunEngines

Metrics: TypeAlias = Mapping[str, Any]


class TrainerSurface:
    """Base class of the trainer with what its users' scripts expect, and training itself does not need."""

    args: AlignmentConfig
    method: AnyMethod
    state: TrainerState
    events: Events
    context: RunContext
    engines: RunEngines
    uploads: Uploads
    output_dir: Path
    planned: PlannedModels
    data: RunData
    given_data: tuple[Any, Any]

    is_fsdp_enabled = False
    is_deepspeed_enabled = True
    is_encoder_decoder = False

    # Models ---------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The policy: the live model, else the one inside the engine, which is built if needed. Then collective.

        Training continues with the engines that were built. With new adapters, it is the ``PeftModel`` around the
        model. Under ZeRO-3 its parameters are partitioned: read them within ``deepspeed.zero.GatheredParameters``.

        Raises:
            OptionError: if ``close()`` has released the trained weights.
        """
        if self.engines.waits_for_model:
            self.build_engines()
        return self.engines.model

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the load-balancing loss of a mixture of experts is part of the loss, and logged as ``aux_loss``."""
        return self.planned.aux_coefficient is not None

    @property
    def model_wrapped(self) -> Any:
        """The DeepSpeed engine if it exists, else :attr:`model`."""
        return self.model if self.engines.models is None else self.engines.models.policy.engine

    @property
    def ref_model(self) -> nn.Module | None:
        """The reference model: the live one that was passed, or the one inside its engine; None if there is none.

        There is none for a method without a reference, with adapters (the reference is the policy with adapters
        disabled), and with precomputed log-probs. A reference that is a copy of the policy, or is given by its path,
        exists once engines are built.
        """
        if not self.method.needs_reference:
            return None
        given = self.planned.reference.live
        if given is not None and self.planned.reference is not self.planned.policy:
            return given
        reference = None if self.engines.models is None else self.engines.models.reference
        return reference.engine.scorer.model if isinstance(reference, EngineReference) else None

    @property
    def optimizer(self) -> Any:
        """The engine's optimizer; before it is built, the one that was passed, or None."""
        return self.events.handler.optimizer or self.engines.optimizers[0]

    @property
    def lr_scheduler(self) -> Any:
        """The engine's learning rate schedule; before it is built, the one that was passed, or None."""
        return self.events.handler.lr_scheduler or self.engines.optimizers[1]

    @cached_property
    def accelerator(self) -> Accelerator:
        """Ranks, device and collectives, with accelerate's names."""
        return Accelerator()

    def build_engines(self) -> None:
        """Build the engines, for training if there is training data, unless already built. All ranks must call it."""
        self.engines.build(total_steps(self.args, self.data.sampler) if self.data.sampler is not None else None)

    # Data -----------------------------------------------------------------------------------------------------------

    @property
    def processing_class(self) -> Any:
        """The tokenizer."""
        return self.planned.processing_class

    @property
    def tokenizer(self) -> Any:
        """Older name of ``processing_class``."""
        return self.processing_class

    @cached_property
    def train_dataset(self) -> Any:
        """The tokenized training rows, which a trainer of the same method accepts; created when first accessed.

        Rows that are excluded from training are not in it. Prompts for generation are unchanged.
        """
        return None if self.data.train is None else self._shown(self.data.train, self.given_data[0])

    @cached_property
    def eval_dataset(self) -> Any:
        """The tokenized evaluation rows in the same form: None, a dataset, or a dict of several."""
        given = self.given_data[1]
        if not isinstance(given, dict):
            return self._shown(self.data.eval[""], given) if self.data.eval else None
        return {name: self._shown(data, given[name]) for name, data in self.data.eval.items()}

    def _shown(self, data: PreparedData, given: Any) -> Any:
        if self.method.kind.keeps_columns and not callable(given):
            return given
        rows, first = data.dataset, data.dataset[:1]
        shown = self.method.shown(first)
        if all(first.get(name) == values for name, values in shown.items()):  # columns are stored in this form
            return rows.select_columns(list(shown))
        return rows.map(
            self.method.shown,
            batched=True,
            remove_columns=rows.column_names,
            keep_in_memory=True,
            load_from_cache_file=False,
        )

    # State of a run -------------------------------------------------------------------------------------------------

    def is_world_process_zero(self) -> bool:
        """Whether this is the first rank."""
        return rank() == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine."""
        return local_rank() == 0

    def predict(self, test_dataset: Any, *_: Any, **__: Any) -> Any:
        """Not supported except for reward models, see :class:`RewardTrainer`.

        Raises:
            OptionError: always.
        """
        raise OptionError(
            f"predict: {type(self).__name__} trains a policy, of which only log-probs are computed; call "
            "evaluate(test_dataset) for loss and metrics, or generate with the saved model"
        )

    def save_state(self) -> None:
        """Write ``trainer_state.json`` to the output folder."""
        self.write_state(self.output_dir)

    def write_state(self, folder: Path) -> None:
        """Write ``trainer_state.json`` to ``folder``, on the first rank."""
        if self.is_world_process_zero():
            self.events.save_state()
            write_json(folder / "trainer_state.json", dataclasses.asdict(self.state))

    def log_metrics(self, split: str, metrics: Metrics) -> None:
        """Print metrics of ``train``, ``eval`` or another split, one per line, on the first rank."""
        if not self.is_world_process_zero():
            return
        shown = self.metrics_format(metrics)
        names, values = (max((len(str(each)) for each in part), default=0) for part in (shown, shown.values()))
        print(f"***** {split} metrics *****")
        for name in sorted(shown):
            print(f"  {name: <{names}} = {shown[name]!s: >{values}}", flush=True)

    def save_metrics(self, split: str, metrics: Metrics, combined: bool = True) -> None:
        """Write metrics to ``{split}_results.json``, and add them to ``all_results.json``."""
        if not self.is_world_process_zero():
            return
        everything = self.output_dir / "all_results.json"
        earlier = json.loads(everything.read_text(encoding="utf-8")) if combined and everything.exists() else {}
        write_json(self.output_dir / f"{split}_results.json", dict(sorted(metrics.items())))
        if combined:
            write_json(everything, dict(sorted({**earlier, **metrics}.items())))

    @staticmethod
    def metrics_format(metrics: Metrics) -> dict[str, Any]:
        """Format metrics for printing: times as ``0:00:01.50``, other numbers with 4 digits."""
        return {name: _formatted(name, value) for name, value in metrics.items()}

    # Callbacks ------------------------------------------------------------------------------------------------------

    @property
    def callback_handler(self) -> Any:
        """transformers' callback handler."""
        return self.events.handler

    @property
    def control(self) -> Any:
        """The requests of the callbacks."""
        return self.events.control

    def add_callback(self, callback: Any) -> None:
        """Add a ``TrainerCallback``, an instance or a class."""
        self.events.handler.add_callback(*check_callbacks([callback]))

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, an instance or a class, and return it; None if it is not found."""
        return self.events.handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, an instance or a class, if present."""
        self.pop_callback(callback)

    # Uploads --------------------------------------------------------------------------------------------------------

    @property
    def hub_model_id(self) -> str | None:
        """The repository with its owner; until the owner is known, the value of the option."""
        repository = self.uploads.repository
        return self.args.hub_model_id if repository is None or not repository.known else repository.name

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository if needed, and check that it is writable. All ranks must call it.

        Args:
            token: replaces ``hub_token``.
            private: replaces ``hub_private_repo``.

        Raises:
            OptionError: if the repository is not available, or the Hub cannot be reached.
        """
        self.uploads.repository = prepared_repository(self.args, self.context.retries, token, private)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        language: str | list[str] | None = None,
        license: str | None = None,
    ) -> None:
        """Write the model card, ``README.md`` in the output folder, unless someone else's card is there.

        Later uploads repeat these additions.

        Args:
            model_name: for the metadata; defaults to the name of the repository or of the output folder.
            dataset_name: the training dataset's name on the Hub.
            tags: added to those of the method.
            language: of the data, for the metadata.
            license: of the model, for the metadata.
        """
        self.uploads.write_card(
            model_name=model_name, dataset_name=dataset_name, tags=tags, language=language, license=license
        )

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save the model to the output folder and upload it with its card. All ranks must call it.

        Args:
            commit_message: message of the commit.
            blocking: wait until the upload has finished or failed.
            token: replaces ``hub_token``.
            revision: replaces ``hub_revision``.
            private: replaces ``hub_private_repo`` if the repository is created.
            **kwargs: see :meth:`create_model_card`.

        Returns:
            On the first rank, the commit, or with ``blocking=False`` a future; None on other ranks.

        Raises:
            OptionError: if the repository is not available.
            HubError: if the upload failed; a line has said how to complete it.
        """
        self.uploads.save_model()
        self.create_model_card(**kwargs)
        future = self.uploads.push(self.output_dir, commit_message or "Upload model", token, private, revision)
        return self.uploads.wait(future) if blocking else future


def _formatted(name: str, value: Any) -> Any:
    if "_runtime" in name and isinstance(value, (int, float)):
        hundredths = int(value * 100)
        return f"{datetime.timedelta(seconds=hundredths // 100)}.{hundredths % 100:02d}"
    return round(value, 4) if isinstance(value, float) else value
