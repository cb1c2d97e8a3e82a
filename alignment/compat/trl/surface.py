"""Attributes and methods of transformers' and TRL's trainers that existing scripts use."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import CommitInfo
from torch import nn
from transformers import TrainerState

from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import barrier, device
from alignment.references.engine import EngineReference
from alignment.run.durable import write_json
from alignment.run.ranks import local_rank, rank, world_size
from alignment.training.callbacks import Events, check_callbacks
from alignment.training.context import RunContext
from alignment.training.data import PreparedData, RunData, total_steps
from alignment.training.hub.uploads import Uploads
from alignment.training.method import AnyMethod
from alignment.training.preparation import PlannedModels
from alignment.training.run_engines import RunEngines


class Accelerator:
    """Ranks and device of the run: the members of accelerate's ``Accelerator`` that scripts and callbacks use."""

    distributed_type = "DEEPSPEED"

    def __init__(self) -> None:
        self.process_index, self.local_process_index, self.num_processes = rank(), local_rank(), world_size()
        self.is_main_process, self.is_local_main_process = rank() == 0, local_rank() == 0
        self.device: torch.device = device()
        self.state = self  # of which scripts read the same fields

    def print(self, *values: Any, **options: Any) -> None:
        """Like ``print``, on the first rank of each machine."""
        if self.is_local_main_process:
            print(*values, **options)

    def wait_for_everyone(self) -> None:
        """Wait until all ranks arrive here."""
        barrier()

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return the model itself, unwrapped from a DeepSpeed engine."""
        inner = getattr(model, "module", model)
        scored = getattr(inner, "model", None) if type(inner).__module__.startswith("alignment.") else None
        return scored if isinstance(scored, nn.Module) else inner


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

    is_fsdp_enabled, is_deepspeed_enabled, is_encoder_decoder = False, True, False

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

    aux_loss_enabled = property(
        lambda self: self.planned.aux_coefficient is not None, doc="Whether experts are balanced by a loss."
    )

    @property
    def model_wrapped(self) -> Any:
        """The DeepSpeed engine if it exists, else :attr:`model`."""
        return self.engines.models.policy.engine if self.engines.models is not None else self.model

    @property
    def ref_model(self) -> nn.Module | None:
        """The reference model: the live one that was passed, or the one inside its engine; None if there is none.

        There is none with adapters, whose reference is the policy without them, and with precomputed log-probs.
        A reference that is a copy of the policy, or is given by its path, exists once engines are built.
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

    processing_class = property(lambda self: self.planned.processing_class, doc="The tokenizer.")
    tokenizer = processing_class  # its older name

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
        options: dict[str, Any] = {"remove_columns": rows.column_names, "keep_in_memory": True}
        return rows.map(self.method.shown, batched=True, load_from_cache_file=False, **options)

    def is_world_process_zero(self) -> bool:
        """Whether this is the first rank."""
        return rank() == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its machine."""
        return local_rank() == 0

    def save_state(self, folder: Path | None = None) -> None:
        """Write ``trainer_state.json`` to ``folder``, by default the output folder, on the first rank."""
        if self.is_world_process_zero():
            self.events.save_state()
            write_json((folder or self.output_dir) / "trainer_state.json", dataclasses.asdict(self.state))

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics of ``train``, ``eval`` or another split, one per line, on the first rank."""
        from transformers import Trainer

        Trainer.log_metrics(cast(Any, self), split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write metrics to ``{split}_results.json``, and add them to ``all_results.json``."""
        from transformers import Trainer

        Trainer.save_metrics(cast(Any, self), split, metrics, combined)

    callback_handler = property(lambda self: self.events.handler, doc="transformers' callback handler.")
    control = property(lambda self: self.events.control, doc="The requests of the callbacks.")

    def add_callback(self, callback: Any) -> None:
        """Add a ``TrainerCallback``, an instance or a class."""
        self.events.handler.add_callback(*check_callbacks([callback]))

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, an instance or a class, and return it; None if it is not found."""
        return self.events.handler.pop_callback(callback)

    remove_callback = pop_callback

    @property
    def hub_model_id(self) -> str | None:
        """The repository with its owner; until the owner is known, the value of the option."""
        repository = self.uploads.repository
        return self.args.hub_model_id if repository is None or not repository.known else repository.name

    def create_model_card(self, model_name: str | None = None, **details: Any) -> None:
        """Write the model card, ``README.md`` in the output folder, unless someone else's card is there.

        Args:
            model_name: for the metadata; defaults to the name of the repository or of the output folder.
            **details: further arguments of transformers, such as ``dataset_name``. Later uploads repeat them.

        Raises:
            TypeError: if an argument is unknown.
        """
        self.uploads.write_card(model_name=model_name, **details)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **details: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save the model to the output folder and upload it with its card. All ranks must call it.

        ``token``, ``revision`` and ``private`` replace the options, and ``details`` are those of the model card.

        Returns:
            On the first rank, the commit, or with ``blocking=False`` a future; None on other ranks.

        Raises:
            OptionError: if the repository is not available.
            HubError: if the upload failed; a line has said how to complete it.
        """
        to = self.uploads.destination(token, private, revision)  # before the weights are gathered
        self.uploads.save_model()
        self.create_model_card(**details)
        future = self.uploads.push(self.output_dir, commit_message or "Upload model", to)
        return self.uploads.wait(future) if blocking else future
