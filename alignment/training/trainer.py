"""The base of all trainers: check and plan on creation, build engines when first needed, train, evaluate.

The constructor follows TRL's, so that a TRL script runs after changing its import. It loads no weights.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel, TrainerState
from transformers.trainer_utils import TrainOutput

from alignment.checkpoint.best import BestModel
from alignment.checkpoint.manifest import Manifest
from alignment.checkpoint.merged import write_merged
from alignment.checkpoint.restore import restore
from alignment.checkpoint.resume import Checkpoint, choose, find
from alignment.checkpoint.run_folder import LOG, RunFolder
from alignment.checkpoint.writer import CheckpointWriter
from alignment.config.errors import LastCheckpointError, OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import barrier, device, on_first_rank
from alignment.engines.cores import share_cores
from alignment.engines.launch_env import init_distributed
from alignment.engines.phases import Phases
from alignment.models.adapters.record import unwrapped
from alignment.models.tasks import CAUSAL_LM
from alignment.references.engine import ReferencePlan
from alignment.reporting.durable import write_json
from alignment.reporting.log import JsonlLog, strict
from alignment.run.activity import ACTIVITY, Limits
from alignment.run.protection import protected
from alignment.run.ranks import local_rank, rank, world_size
from alignment.run.retries import Retries
from alignment.run.status import begin_status, ending_in_status
from alignment.training.arguments import (
    check_collator,
    check_data_source,
    check_rows_given,
    data_of_commands,
    inputs_of,
    model_and_options,
    named_datasets,
    refuse_arguments,
    with_adapter_names,
    with_quantization,
)
from alignment.training.callbacks import Events, check_callbacks, check_early_stopping, check_reporting, log_in
from alignment.training.context import Resources, RunContext
from alignment.training.data import PreparedData, RunData, total_steps
from alignment.training.evaluation import evaluate, evaluation_windows
from alignment.training.hub.card import Subject
from alignment.training.hub.publisher import Publisher
from alignment.training.hub.repository import Repository, prepared_repository
from alignment.training.hub.uploads import Uploads
from alignment.training.loop import TrainingLoop
from alignment.training.method import AnyMethod
from alignment.training.preparation import (
    DataPreparation,
    GivenModels,
    check_evaluation,
    place_for,
    plan_models,
)
from alignment.training.run_engines import RunEngines
from alignment.training.run_manifest import run_manifest
from alignment.training.run_page import write_page
from alignment.training.summary import write_report
from alignment.training.surface.again import begin_again
from alignment.training.surface.overrides import check_attributes, check_overrides, check_saving
from alignment.training.surface.positional import Order, taking_positions
from alignment.training.surface.trainer_surface import TrainerSurface


class AlignmentTrainer(TrainerSurface):
    """Base class of the trainers; use that of a method, such as :class:`KTOTrainer`.

    Args:
        model: path, Hub name or live transformers model; None uses ``args.model_name_or_path``.
        ref_model: the reference, in the same forms; None uses the initial policy.
        args: the options.
        train_dataset: a ``datasets.Dataset`` or a list of rows; optional with ``eval_dataset``.
        eval_dataset: a dataset, or a dict of several by name.
        processing_class: the tokenizer; None loads the model's.
        tokenizer: older name of ``processing_class``.
        callbacks: transformers' ``TrainerCallback`` instances or classes.
        optimizers: your own ``(optimizer, scheduler)`` for the parameters of a live ``model``, or Nones.
        peft_config: PEFT's configuration of adapters to train instead of the full model. If ``model`` is a
            live ``PeftModel``, its adapters are trained; with ``peft_config`` they are first merged into its base, in
            place.
        model_adapter_name: see the option.
        ref_adapter_name: see the option.
        data_collator: one of TRL's or transformers' that only pads, which has no effect here; others are refused.
        quantization_config: how bitsandbytes quantizes the weights of a ``model`` given by name; same as
            ``quantization_config`` among ``model_init_kwargs``.
        **unsupported: further arguments of TRL's and transformers' trainers, such as ``compute_metrics`` and
            ``model_init``; each is refused by name.

    Raises:
        AlignmentError: for any error in options, model, tokenizer, data or folder that is detected before loading.
    """

    config_class: ClassVar[type[AlignmentConfig]]
    method_class: ClassVar[type[AnyMethod]]
    order: ClassVar[Order] = Order.PLAIN

    @taking_positions
    def __init__(
        self,
        model: str | PreTrainedModel | None = None,
        ref_model: str | PreTrainedModel | None = None,
        args: AlignmentConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        tokenizer: Any = None,
        callbacks: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        model_adapter_name: str | None = None,
        ref_adapter_name: str | None = None,
        data_collator: Any = None,
        quantization_config: Any = None,
        **unsupported: Any,
    ) -> None:
        check_overrides(type(self), AlignmentTrainer)
        refuse_arguments(unsupported)
        check_collator(data_collator, self.method_class.kind)
        callbacks, datasets = check_callbacks(callbacks), (train_dataset, eval_dataset)
        given = GivenModels(model, ref_model, None, peft_config, optimizers, (processing_class, tokenizer))
        adapter_names = (model_adapter_name, ref_adapter_name)
        self.args, given = self._resolve(args, given, datasets, adapter_names, quantization_config)
        self._join(given, datasets)
        self.planned = plan_models(self.args, self.method, given, self.tell)
        self.resources, repository = self._resources(), self._hub_repository()
        self.data = self._prepare_data(*datasets, optimizers)
        self._create_run(callbacks, optimizers, repository)
        self.events("on_init_end")

    def _resolve(
        self,
        args: AlignmentConfig | None,
        given: GivenModels,
        datasets: tuple[Any, Any],
        adapter_names: tuple[str | None, str | None],
        quantization_config: Any,
    ) -> tuple[AlignmentConfig, GivenModels]:
        """Return the options and the models that the arguments result in together."""
        check_data_source(args, datasets[0])
        model, adapted = unwrapped(given.model)
        model, args = model_and_options(type(self).__name__, self.config_class, model, args)
        args = with_adapter_names(with_quantization(args, model, quantization_config), *adapter_names).sealed()
        check_reporting(args.report_to)
        check_saving(type(self), AlignmentTrainer, saves=args.save_strategy != "no")
        check_rows_given(args, *datasets)
        return args, replace(given, model=model, adapted=adapted)

    def _join(self, given: GivenModels, datasets: tuple[Any, Any]) -> None:
        """Join the other ranks, and check the output folder."""
        init_distributed(self.args.use_cpu)
        self.given_data = datasets
        self.retries = Retries(self.args.retries, self.args.retry_pause)
        ACTIVITY.limits = Limits(
            least=self.args.hang_timeout,
            factor=self.args.hang_factor,
            first=self.args.hang_timeout_first,
            silence=self.args.peer_timeout,
        )
        self.state = TrainerState(is_world_process_zero=rank() == 0, is_local_process_zero=local_rank() == 0)
        self.method = self.method_class(self.args)
        self.output_dir = Path(self.args.output_dir or "")
        self.folder = RunFolder(self.output_dir, self.args, self.tell)
        if datasets[0] is not None:
            models = (("model", given.model), ("ref_model", given.ref_model), *self._models_read())
            if self.args.resume_from_checkpoint and rank() == 0:
                find(self.output_dir, self.args.resume_from_checkpoint, self.args.method)
            self.folder.check(inputs_of(self.args, models, datasets))

    def _hub_repository(self) -> Repository | None:
        """Return the repository of uploads, checked and created before data are tokenized; None without uploads."""
        if not self.args.push_to_hub:
            return None
        return prepared_repository(self.args, self.retries, self.tell, resumes=bool(self.args.resume_from_checkpoint))

    def _models_read(self) -> Iterable[tuple[str, Any]]:
        """Arguments that are further models of the run, and their values."""
        return ()

    def _resources(self) -> Resources:
        """Return the method's further resources."""
        return Resources()

    def _preparation(self) -> DataPreparation:
        """Return what tokenizes the datasets."""
        return DataPreparation(self.args, self.method, self.planned, self.retries, self.tell)

    def _prepare_data(self, train_dataset: Any, eval_dataset: Any, optimizers: tuple[Any, Any]) -> RunData:
        """Tokenize and check the datasets; collective."""
        if self.planned.engines.works_in_host_memory(self.args):
            self.tell(share_cores())
        with ACTIVITY("data"):
            data = self._preparation()(train_dataset, eval_dataset, own_optimizer=any(optimizers))
        for each in data.sets:
            self.resources.check_data(each)
        check_evaluation(self.args, self.metrics, data.eval)
        place_for(self.args, self.method, self.planned, max((each.table.longest for each in data.sets), default=0))
        return data

    def _create_run(self, callbacks: Any, optimizers: tuple[Any, Any], repository: Repository | None) -> None:
        """Create what exists for the whole run: its state, its log, its callbacks, and its engines, not yet built."""
        self.events = Events(self.args, self.state, callbacks, self.processing_class)
        self.phases = Phases(device())
        self.context = RunContext(
            args=self.args,
            method=self.method,
            output_dir=self.output_dir,
            processing_class=self.processing_class,
            state=self.state,
            events=self.events,
            phases=self.phases,
            log_file=JsonlLog(self.output_dir / LOG if rank() == 0 else None, self.tell, timed=True),
            retries=self.retries,
            log=self.log,
            tell=self.tell,
            data=self.data,
        )
        if getattr(self.args, "generate_during_eval", False):
            from alignment.training.sampling.answers import answers_of  # imports generation code

            self.context.answers = answers_of(self.context, lambda: self._writes_logs)
        self.uploads = Uploads(self.context, self._subject)
        handler = self.events.handler
        if repository is not None:
            self.uploads.use(repository)
            handler.add_callback(self.uploads)
        self.publisher = Publisher(self.context, self.uploads, self.save_model)
        self.engines = RunEngines(
            self.context, self.planned.engines, optimizers, self.planned.aux_coefficient, self.resources
        )
        handler.model = self.engines.model
        handler.train_dataloader = self.get_train_dataloader() if self.data.train is not None else None
        handler.eval_dataloader = self.get_eval_dataloader() if self.data.eval else None
        self._at_first: Manifest | None = None  # set if engines were built before train()

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics other than the loss."""
        return (*self.method.metrics, *self.resources.metrics)

    def close(self) -> None:
        """Release the engines. Trained weights are released too, so save before; the trainer cannot train again.

        A live model keeps the effects of training: its trained weights (still partitioned under ZeRO-3), dropout of 0,
        gradient checkpointing, and a head that can also return log-probs.
        """
        self.engines.close()
        if ACTIVITY.status is not None and ACTIVITY.status.path.parent == self.output_dir:
            ACTIVITY.status.close()
        self.folder.release()

    def end(self) -> None:
        """Same as :meth:`close`, with the name that TRL's scripts call."""
        self.close()

    # Training -------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the end of the schedule.

        A second call trains for the same duration again, starting from the current weights and the optimizer's
        moments, with a new schedule; checkpoints and logs of the first run are moved to ``previous-1`` in the
        output folder.

        Args:
            resume_from_checkpoint: ``latest`` (or True) or a folder to resume from; None uses the option.

        Returns:
            transformers' ``TrainOutput``: steps, mean loss, and metrics.

        Raises:
            OptionError: if there is no training data, or the checkpoint is of another run.
            CheckpointError: if the checkpoint cannot be resumed from.
            TrainingError: if the loss is not finite; no update was made with it.
            LastCheckpointError: if training has finished but the last checkpoint could not be written.
            RunStopped: if a signal or the file ``STOP`` asked the run to stop; its state has been saved.
        """
        check_attributes(self)
        self.args.check_late()
        check_saving(type(self), AlignmentTrainer, saves=self.args.save_strategy != "no")
        check_evaluation(self.args, self.metrics, self.data.eval)
        data, sampler = self.data.train, self.data.sampler
        if data is None or sampler is None:
            said = data_of_commands(self.args)
            raise OptionError(f"train_dataset: required for training{said or '; pass it to the trainer'}")
        asked = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        if self.engines.trained:
            begin_again(self.context, self.engines, total_steps(self.args, sampler), resumes=bool(asked))
        check_early_stopping(self.args, self.events.handler.callbacks)
        log_in(self.events.handler.callbacks)
        present, self._at_first = self._at_first or self._present(), None
        chosen = None
        if asked:
            anyway = self.args.resume_anyway
            chosen = functools.partial(choose, self.output_dir, asked, present, anyway=anyway, tell=self.tell)
        checkpoint = self.folder.enter(chosen)
        if self.is_world_process_zero():
            known = {"method": self.args.method, "world_size": world_size()}
            known["resumed_from"] = "" if checkpoint is None else checkpoint.folder.name
            begin_status(self.output_dir, bool(asked), self.tell, **known)
            ACTIVITY.at_failure = functools.partial(write_page, self.output_dir, self.tell)
        with ending_in_status(), protected(self.output_dir):
            with ACTIVITY("load"), contextlib.ExitStack() as loading:
                loading.callback(self.folder.release)
                loop = TrainingLoop(self.context, self.engines, data, sampler, self.evaluate)
                self.engines.build(loop.total_steps)
                if checkpoint is not None:
                    self._go_on(checkpoint, loop, present)
                writer = self._writer(checkpoint, present)
                on_first_rank(self._write_settings)
                loading.pop_all()
            self.engines.trained = True
            with self.uploads.ending():
                result = loop.run(evaluation_windows(self.context), writer)
                self.uploads.finish()
            self._finish(writer)
        return result

    def _present(self) -> Manifest:
        """Return what checkpoints record of the current run."""
        reference = self.planned.reference if self.method.needs_reference else None
        given = None if reference is self.planned.policy else reference
        return run_manifest(self.context, self.planned.engines, given, self.resources)

    def build_engines(self) -> None:
        """Build the engines; properties of live models are recorded before an engine changes them."""
        if self.data.sampler is not None and not self.engines.trained:
            self._at_first = self._at_first or self._present()
        super().build_engines()

    def _writer(self, checkpoint: Checkpoint | None, present: Manifest) -> CheckpointWriter:
        """Return the writer of further checkpoints."""
        manifest = replace(present, run=self.context.identity.name)
        run_state, state = self.context.run_state, self.state
        hold = self.folder.lock.check
        writer = CheckpointWriter(
            self.args, self.engines, run_state, state, manifest, self.write_state, hold, self.tell
        )
        if checkpoint is not None and checkpoint.folder.parent.resolve() == self.output_dir.resolve():
            writer.newest = checkpoint.step
        if self.args.save_strategy != "no":
            self.tell(writer.describe())
        return writer

    def _go_on(self, checkpoint: Checkpoint, loop: TrainingLoop, present: Manifest) -> None:
        """Restore a run into the engines, and prepare the loop to continue."""
        restore(checkpoint, self.engines, self.context.run_state, present, self.tell)
        identity = self.context.identity
        if ACTIVITY.status is not None:  # only the status knows of attempts without a checkpoint
            identity.attempt = max(identity.attempt, ACTIVITY.status.status.attempt)
        self.tell(BestModel(self.args, self.state).moved_to(checkpoint.folder.parent))
        loop.resumed = {
            "run": identity.name,
            "attempt": identity.attempt,
            "checkpoint": checkpoint.folder.name,
            "world_size": world_size(),
            "stage": self.engines.stage,
        }
        loop.ignores_end = self.args.resume_anyway
        self.tell(f"resume_from_checkpoint: {checkpoint.folder}, after step {checkpoint.step} of {loop.total_steps}")
        self.folder.set_newer_aside(checkpoint.step)

    def _finish(self, writer: CheckpointWriter) -> None:
        """Write what follows a completed run: its report, and the merged model if requested."""
        self.write_report(show=True)
        if self.args.merged_output_dir is not None:
            with self.uploads.held():
                self.save_model()
            write_merged(self.args, self.planned.engines.source, self.tell)
        if writer.failure is not None:
            raise LastCheckpointError(
                f"output_dir: training has finished, but the last checkpoint could not be written: {writer.failure}"
            )

    def precompute(self) -> None:
        """Compute and store the reference log-probs of the training and evaluation sets without loading the policy.

        Raises:
            OptionError: if ``ref_placement`` is not ``precomputed``.
        """
        if self.engines.stores is None:
            raise OptionError(
                f"{setting('ref_placement', self.args.ref_placement)}: has nothing to precompute; set "
                "ref_placement: precomputed"
            )
        self.engines.stores.reference().close()

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return loss and metrics of the evaluation data or ``eval_dataset``; for several sets, ``eval_NAME_loss`` …

        Each set has its own log record and callback event; the result contains the metrics of all sets.

        Args:
            eval_dataset: replaces the constructor's: a dataset, a list of rows, a dict of several, or the name of
                one of the constructor's.
            ignore_keys: not supported, since there are no model outputs; must be empty.
            metric_key_prefix: prefix of the names.
        """
        data = self.data.eval
        if isinstance(eval_dataset, str):
            if eval_dataset not in data:
                raise OptionError(
                    f"eval_dataset: no set named {eval_dataset!r} (available: {', '.join(data) or 'none'})"
                )
            data = {eval_dataset: data[eval_dataset]}
        elif eval_dataset is not None:
            data = {
                n: self._preparation().one(d, None, "eval_dataset") for n, d in named_datasets(eval_dataset).items()
            }
            self.engines.know(data.values())
        if not data:
            raise OptionError("eval_dataset: required for evaluation; pass it to the trainer or to evaluate()")
        with protected(self.output_dir):
            return self._evaluated(data, ignore_keys, metric_key_prefix)

    def _evaluated(
        self, data: Mapping[str, PreparedData], ignore_keys: list[str] | None, prefix: str
    ) -> dict[str, float]:
        """Evaluate, log and notify the callbacks, set by set."""
        if ignore_keys:
            raise OptionError(
                f"ignore_keys={ignore_keys}: not supported, since evaluation returns no model outputs; remove it"
            )
        if not self.engines.ready:
            self.build_engines()
        metrics: dict[str, float] = {}
        for name, part in data.items():
            own = evaluate(self.context, self.engines.window_pass, part, f"{prefix}_{name}" if name else prefix)
            self.log(own)
            self.events("on_evaluate", metrics=own)
            metrics |= own
        return metrics

    # For callers ----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | Path | None = None, _internal_call: bool = False) -> None:
        """Write model and tokenizer in Hugging Face format, for any ZeRO stage. All ranks must call it.

        When adapters are trained, only the adapters and other trained weights are written, in PEFT's format. With
        ``push_to_hub``, the folder is then uploaded.
        """
        folder = Path(output_dir or self.output_dir)
        on_first_rank(lambda: self.folder.check_not_replaced(folder))
        self.engines.build(None)
        with ACTIVITY("save model"):
            self.engines.write(folder)
            barrier()
        if self.args.push_to_hub and not _internal_call and not self.uploads.holds:
            self.publisher.push_saved(folder)

    # Output ---------------------------------------------------------------------------------------------------------

    def tell(self, text: str | None) -> None:
        """Print a line on the first rank; does nothing for None."""
        if text is not None and rank() == 0:
            print(text, flush=True)

    def log(self, logs: Mapping[str, float], start_time: float | None = None) -> None:
        """Add a record to ``state.log_history`` and to ``log.jsonl``, and notify the callbacks.

        Args:
            logs: the record.
            start_time: ignored; subclasses pass it because transformers' method has it. Records with a speed
                already contain it.
        """
        entry = strict({**logs, "step": self.state.global_step})
        if self.state.epoch is not None:
            entry.setdefault("epoch", self.state.epoch)
        self.events("on_log", logs={name: value for name, value in entry.items() if name != "step"})
        self.state.log_history.append(entry)
        if self.args.disable_tqdm and rank() == 0:
            print(json.dumps(entry), flush=True)
        if self._writes_logs:
            self.retries.write(self.context.log_file.write)
            self.context.log_file.write(entry)

    @property
    def _writes_logs(self) -> bool:
        """Whether this trainer may write to the files in the output folder."""
        return self.data.sampler is not None and not self.folder.held_by_earlier_run

    def settings(self) -> dict[str, Any]:
        """Return the resolved settings of the run by the names of files in the output folder."""
        plan = self.planned.engines
        files = {"options.json": self.args.to_dict(), "deepspeed.json": plan.policy}
        if isinstance(plan.reference, ReferencePlan):
            files["ref_deepspeed.json"] = plan.reference.frozen.ds_config
        return files | self.resources.settings()

    def write_report(self, *, show: bool) -> None:
        """Write ``report.md``, and print it if ``show``. All ranks must call it."""
        write_report(self.context, self.engines, show=show)

    def _write_settings(self) -> None:
        """Write the resolved settings on the first rank."""
        for name, content in self.settings().items():
            write_json(self.output_dir / name, content)

    def _subject(self) -> Subject:
        """Return what a model card says about the model."""
        name = self.planned.policy.name
        return Subject(
            title=(self.args.hub_model_id or self.output_dir.absolute().name).split("/")[-1],
            base=name if isinstance(name, str) and name else None,
            is_classifier=self.method.task is not CAUSAL_LM,
            is_adapter=self.planned.engines.adapters is not None,
            tags=list(getattr(self.engines.model, "model_tags", None) or ()),
        )
