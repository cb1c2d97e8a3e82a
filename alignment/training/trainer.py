"""The base of all trainers: check and plan on creation, build engines when first needed, train, evaluate.

The constructor follows TRL's, so that a TRL script runs after changing its import. It loads no weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedModel, TrainerState
from transformers.trainer_utils import TrainOutput

from alignment.checkpoint.best import BestModel
from alignment.checkpoint.manifest import Manifest
from alignment.checkpoint.resume import Checkpoint, choose, find, restore
from alignment.checkpoint.run_folder import LOG, RunFolder
from alignment.checkpoint.writer import CheckpointWriter
from alignment.compat.trl.overrides import check_attributes, check_overrides, check_saving
from alignment.compat.trl.surface import TrainerSurface
from alignment.config.errors import HubError, LastCheckpointError, OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions
from alignment.data.windows import WindowSampler
from alignment.engines.collectives import barrier, device, on_first_rank
from alignment.engines.host import share_cores
from alignment.engines.launch_env import init_distributed
from alignment.engines.phases import Phases
from alignment.models.adapters.record import unwrapped
from alignment.models.tasks import CAUSAL_LM
from alignment.references.engine import ReferencePlan
from alignment.reporting.log import JsonlLog, strict
from alignment.reporting.progress import evaluation_line, say
from alignment.run.activity import ACTIVITY
from alignment.run.durable import write_json
from alignment.run.ending import ending_in_status
from alignment.run.protection import protected
from alignment.run.ranks import local_rank, rank, tell, world_size
from alignment.run.retries import Retries
from alignment.run.status_file import StatusFile, next_attempt
from alignment.training.arguments import (
    check_collator,
    check_datasets,
    data_of_commands,
    inputs_of,
    model_and_options,
    named_datasets,
    reference_of,
    refuse_arguments,
    with_arguments,
)
from alignment.training.callbacks import Events, check_before_loading, check_callbacks, check_reporting
from alignment.training.context import Resources, RunContext
from alignment.training.data import DataPreparation, PreparedData, RunData, check_evaluation, total_steps
from alignment.training.evaluation import evaluate, evaluation_windows
from alignment.training.hub.contents import Subject
from alignment.training.hub.repository import Repository, prepared_repository
from alignment.training.hub.uploads import Uploads
from alignment.training.loop import TrainingLoop
from alignment.training.memory_plan import plan_memory
from alignment.training.method import AnyMethod
from alignment.training.out_of_memory import memory_explained
from alignment.training.preparation import GivenModels, check_offloading, place_for, plan_models
from alignment.training.rehearsal import Rehearsal
from alignment.training.run_engines import RunEngines
from alignment.training.run_manifest import run_manifest
from alignment.training.run_page import write_page, write_report
from alignment.training.run_state import begin_again


class AlignmentTrainer(TrainerSurface):
    """Base class of the trainers; use that of a method, such as :class:`KTOTrainer`.

    Args:
        model: path, Hub name or live transformers model; None uses ``args.model_name_or_path``.
        positional: ``ref_model`` in trainers of methods with a reference; all other arguments are keywords.
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
    takes_reference: ClassVar[bool] = False  # whether ``ref_model`` may follow ``model`` by position

    def __init__(
        self,
        model: str | PreTrainedModel | None = None,
        *positional: Any,
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
        check_overrides(type(self))
        ref_model = reference_of(type(self).__name__, positional, ref_model, self.takes_reference)
        refuse_arguments(unsupported)
        check_collator(data_collator)
        callbacks, datasets = check_callbacks(callbacks), (train_dataset, eval_dataset)
        given = GivenModels(model, ref_model, None, peft_config, optimizers, (processing_class, tokenizer))
        adapter_names = (model_adapter_name, ref_adapter_name)
        self.args, given = self._resolve(args, given, datasets, adapter_names, quantization_config)
        self._join()
        self._check_folder(given, datasets)
        self.planned = plan_models(self.args, self.method, given)
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
        model, adapted = unwrapped(given.model)
        model, args = model_and_options(type(self).__name__, self.config_class, model, args)
        trained, reference = adapter_names
        names = {"model_adapter_name": trained, "ref_adapter_name": reference}
        args = with_arguments(args, model, quantization_config, **names).sealed()
        check_reporting(args.report_to)
        check_saving(type(self), saves=args.save_strategy != "no")
        check_datasets(args, *datasets)
        return args, replace(given, model=model, adapted=adapted)

    def _join(self) -> None:
        """Join the other ranks, and create what each of them needs before models are planned."""
        init_distributed(self.args.use_cpu)
        self.retries = Retries(self.args.retries, self.args.retry_pause)
        ACTIVITY.limits = self.args
        self.state = TrainerState(is_world_process_zero=rank() == 0, is_local_process_zero=local_rank() == 0)
        self.method = self.method_class(self.args)

    def _check_folder(self, given: GivenModels, datasets: tuple[Any, Any]) -> None:
        """Check the output folder and the checkpoint to resume from; nothing is written yet."""
        self.given_data = datasets
        self.output_dir = Path(self.args.output_dir or "")
        self.folder = RunFolder(self.output_dir, self.args)

        def check() -> None:
            models = (("model", given.model), ("ref_model", given.ref_model), *self._models_read())
            if self.args.resume_from_checkpoint:
                find(self.output_dir, self.args.resume_from_checkpoint, self.args.method)
            self.folder.check(inputs_of(self.args, models, datasets))

        if datasets[0] is not None:
            on_first_rank(check)

    def _hub_repository(self) -> Repository | None:
        """Return the repository of uploads, checked and created before data are tokenized; None without uploads."""
        if not self.args.push_to_hub:
            return None
        return prepared_repository(self.args, self.retries)

    def _models_read(self) -> Iterable[tuple[str, Any]]:
        """Arguments that are further models of the run, and their values."""
        return ()

    def _resources(self) -> Resources:
        """Return the method's further resources."""
        return Resources()

    def _preparation(self) -> DataPreparation:
        """Return what tokenizes the datasets."""
        return DataPreparation(self.args, self.method, self.planned, self.retries)

    def _prepare_data(self, train_dataset: Any, eval_dataset: Any, optimizers: tuple[Any, Any]) -> RunData:
        """Tokenize and check the datasets; collective."""
        if self.planned.engines.works_in_host_memory(self.args):
            tell(share_cores())
        with ACTIVITY("data"):
            data = self._preparation()(train_dataset, eval_dataset, own_optimizer=any(optimizers))
        for each in data.sets:
            self.resources.check_data(each)
        check_evaluation(self.args, self.metrics, data.eval)
        place_for(self.args, self.method, self.planned, [each.table for each in data.sets])
        if data.train is not None:
            check_offloading(self.args, self.planned.engines, data.train.table)
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
            log_file=JsonlLog(self.output_dir / LOG if rank() == 0 else None, timed=True),
            retries=self.retries,
            log=self.log,
            data=self.data,
        )
        if isinstance(self.args, SequenceOptions) and self.args.generate_during_eval:
            from alignment.training.sampling import EvaluationAnswers  # imports generation code

            self.context.answers = EvaluationAnswers(self.context, lambda: self._writes_logs)
        self.uploads = Uploads(self.context, self._subject, lambda: self.save_model(_internal_call=True))
        handler = self.events.handler
        if repository is not None:
            self.uploads.repository = repository
            handler.add_callback(self.uploads)
        longest = max((each.table.longest for each in self.data.sets), default=0)
        self.context.memory_plan = plan_memory(self.args, self.method, self.planned, self.resources.frozen, longest)
        self.engines = RunEngines(
            self.context, self.planned.engines, optimizers, self.planned.aux_coefficient, self.resources
        )
        handler.model = self.engines.model
        self._manifest_before_building: Manifest | None = None  # set if engines were built before train()

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics other than the loss."""
        return (*self.method.metrics, *self.resources.metrics)

    def close(self) -> None:
        """Release the engines. Trained weights are released too, so save before; the trainer cannot train again.

        A live model keeps the effects of training: its trained weights (still partitioned under ZeRO-3), dropout of 0,
        gradient checkpointing, tiled MLPs, and a head that can also return log-probs.
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
            RunStopped: if a signal or the file ``STOP`` asked the run to stop; the message says what was saved.
        """
        data, sampler = self._check_training()
        asked = self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint
        if self.engines.trained:
            begin_again(self.context, self.engines, total_steps(self.args, sampler), resumes=bool(asked))
        manifest, self._manifest_before_building = self._manifest_before_building or self.manifest(), None
        with protected(self.output_dir, self.args), contextlib.ExitStack() as ends:
            checkpoint = self._enter_folder(asked, manifest)
            ends.enter_context(ending_in_status())
            ends.enter_context(memory_explained(self.context, self.engines))
            loop, writer, resumed = self._load(data, sampler, checkpoint, manifest)
            with self.uploads.ending():
                result = loop.run(evaluation_windows(self.context), writer, resumed)
            self._finish(writer)
        return result

    def _check_training(self) -> tuple[PreparedData, WindowSampler]:
        """Check what may have been set since the trainer was created; return the training data and its windows."""
        check_attributes(self)
        self.args.check_late()
        check_saving(type(self), saves=self.args.save_strategy != "no")
        check_evaluation(self.args, self.metrics, self.data.eval)
        if self.data.train is None or self.data.sampler is None:
            said = data_of_commands(self.args)
            raise OptionError(f"train_dataset: required for training{said or '; pass it to the trainer'}")
        check_before_loading(self.args, self.events.handler.callbacks)
        return self.data.train, self.data.sampler

    def _enter_folder(self, asked: str | bool | None, manifest: Manifest) -> Checkpoint | None:
        """Take possession of the output folder; return the checkpoint to resume from, or None for a new run."""
        chosen = None
        if asked:
            anyway = self.args.resume_anyway
            chosen = functools.partial(choose, self.output_dir, asked, manifest, anyway=anyway)
        checkpoint = self.folder.enter(chosen)
        if rank() == 0:
            known = {"method": self.args.method, "world_size": world_size()}
            resumed_from = "" if checkpoint is None else checkpoint.folder.name
            status, ACTIVITY.step = next_attempt(self.output_dir, bool(asked), resumed_from, **known), 0
            ACTIVITY.status = StatusFile(self.output_dir, status, ACTIVITY.in_status)
            ACTIVITY.status.flush()
            ACTIVITY.at_failure = functools.partial(write_page, self.output_dir)
        return checkpoint

    def _load(
        self, data: PreparedData, sampler: WindowSampler, checkpoint: Checkpoint | None, manifest: Manifest
    ) -> tuple[TrainingLoop, CheckpointWriter, dict[str, Any] | None]:
        """Build the engines and restore the checkpoint.

        Returns:
            The loop, the writer of further checkpoints, and the record of the log about a resume.
        """
        try:
            with ACTIVITY("load"):
                rehearsal = Rehearsal(self.context, self.engines, data)
                loop = TrainingLoop(self.context, self.engines, data, sampler, self.evaluate, rehearsal)
                self.engines.build(loop.total_steps)
                resumed = None if checkpoint is None else self._restore(checkpoint, loop.total_steps, manifest)
                writer = self._writer(checkpoint, manifest)
                on_first_rank(self._write_settings)
        except BaseException:
            self.folder.release()
            raise
        self.engines.trained = True
        return loop, writer, resumed

    def manifest(self) -> Manifest:
        """Return what checkpoints record of the current run."""
        reference = self.planned.reference if self.method.needs_reference else None
        given = None if reference is self.planned.policy else reference
        return run_manifest(self.context, self.planned.engines, given, self.resources)

    def build_engines(self) -> None:
        """Build the engines; properties of live models are recorded before an engine changes them."""
        if self.data.sampler is not None and not self.engines.trained:
            self._manifest_before_building = self._manifest_before_building or self.manifest()
        super().build_engines()

    def _writer(self, checkpoint: Checkpoint | None, manifest: Manifest) -> CheckpointWriter:
        """Return the writer of further checkpoints."""
        manifest = replace(manifest, run=self.context.identity.name)
        run_state, state = self.context.run_state, self.state
        hold = self.folder.lock.check
        writer = CheckpointWriter(self.args, self.engines, run_state, state, manifest, self.save_state, hold)
        if checkpoint is not None and checkpoint.folder.parent.resolve() == self.output_dir.resolve():
            writer.newest = checkpoint.step
        if self.args.save_strategy != "no":
            writer.check()
        return writer

    def _restore(self, checkpoint: Checkpoint, total_steps: int, manifest: Manifest) -> dict[str, Any]:
        """Restore a run into the engines and the context; return the record of the log about it."""
        restore(checkpoint, self.engines, self.context.run_state, manifest)
        identity = self.context.identity
        if ACTIVITY.status is not None:  # only the status knows of attempts without a checkpoint
            identity.attempt = max(identity.attempt, ACTIVITY.status.status.attempt)
        tell(BestModel(self.args, self.state).moved_to(checkpoint.folder.parent))
        tell(f"resume_from_checkpoint: {checkpoint.folder}, after step {checkpoint.step} of {total_steps}")
        self.folder.set_newer_aside(checkpoint.step)
        return {
            "run": identity.name,
            "attempt": identity.attempt,
            "checkpoint": checkpoint.folder.name,
            "world_size": world_size(),
            "stage": self.planned.engines.policy["zero_optimization"]["stage"],
        }

    def _finish(self, writer: CheckpointWriter) -> None:
        """Write what follows a completed run: its report, and the merged model if requested."""
        self.write_report(show=True)
        if self.args.merged_output_dir is not None:
            self.save_model(_internal_call=True)
            from alignment.checkpoint.export import write_merged  # imports peft

            write_merged(self.args, self.planned.engines.source)
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
        refuse_ignored_keys(ignore_keys)
        with protected(self.output_dir, self.args), memory_explained(self.context, self.engines):
            return self._evaluate_sets(self._evaluation_data(eval_dataset), metric_key_prefix)

    def _evaluate_sets(self, sets: Mapping[str, PreparedData], prefix: str) -> dict[str, float]:
        """Evaluate, log and notify the callbacks, set by set."""
        metrics: dict[str, float] = {}
        if not self.engines.ready:
            self.build_engines()
        for name, data in sets.items():
            prefixed = f"{prefix}_{name}" if name else prefix
            own = evaluate(self.context, self.engines.window_pass, data, prefixed)
            self.log(own)
            say(evaluation_line(self.state.global_step, self.state.max_steps, prefixed, own))
            self.events("on_evaluate", metrics=own)
            metrics |= own
        return metrics

    def _evaluation_data(self, given: Any) -> Mapping[str, PreparedData]:
        """Return the sets to evaluate by name: the constructor's, one of them, or others, which are tokenized."""
        data = self.data.eval
        if isinstance(given, str):
            if given not in data:
                raise OptionError(f"eval_dataset: no set named {given!r} (available: {', '.join(data) or 'none'})")
            data = {given: data[given]}
        elif given is not None:
            data = {n: self._preparation().one(d, None, "eval_dataset") for n, d in named_datasets(given).items()}
            self.engines.check_known(data.values())
        if not data:
            raise OptionError("eval_dataset: required for evaluation; pass it to the trainer or to evaluate()")
        return data

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
        if self.args.push_to_hub and not _internal_call:
            try:
                if folder == self.output_dir:
                    self.create_model_card()
                self.uploads.push(folder, "Model save")
            except (HubError, OptionError) as error:
                tell(f"{error}; training is not affected")
            self.uploads.wait()

    # Output ---------------------------------------------------------------------------------------------------------

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
        self.state.log_history.append(entry)
        self.events("on_log", logs={name: value for name, value in entry.items() if name != "step"})
        if self._writes_logs:
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


def refuse_ignored_keys(ignore_keys: list[str] | None) -> None:
    """Refuse keys of model outputs to leave out of an evaluation.

    Raises:
        OptionError: if there are any.
    """
    if ignore_keys:
        raise OptionError(
            f"ignore_keys={ignore_keys}: not supported, since evaluation returns no model outputs; remove it"
        )
