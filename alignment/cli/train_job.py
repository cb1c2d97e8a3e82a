"""From parsed options to a trained model on disk, to stored reference log-probs, or to a dry run."""

from __future__ import annotations

from pathlib import Path

from datasets import disable_progress_bars
from transformers.utils import logging as transformers_logging

from alignment.checkpoint.run_folder import check_output_folder
from alignment.cli.dry_run import dry_run_lines, print_dry_run
from alignment.config.checks import check_command_line
from alignment.config.dtypes import Machine
from alignment.config.errors import LastCheckpointError
from alignment.config.options import AlignmentConfig
from alignment.config.registry import METHODS
from alignment.models.tasks import CAUSAL_LM
from alignment.reporting.page import PAGE
from alignment.reporting.progress import draws_bars
from alignment.run.ranks import rank, tell
from alignment.training.data import evaluation_data, tokenized_folder, training_data
from alignment.training.run_page import REPORT
from alignment.training.trainer import AlignmentTrainer


def hide_bars(options: AlignmentConfig) -> bool:
    """Hide progress bars of libraries, unless this is the first rank and bars are drawn; return whether it did."""
    hidden = options.process_index > 0 or not draws_bars(options.disable_tqdm)
    if hidden:
        disable_progress_bars()
        transformers_logging.disable_progress_bar()
    return hidden


def build_trainer(options: AlignmentConfig) -> AlignmentTrainer:
    """Return the trainer of ``options.method`` with the datasets of the options. No weights are loaded."""
    hide_bars(options)
    check_command_line(options)
    if not options.resume_from_checkpoint and rank() == 0:  # checked here, as a script may still resume in train()
        check_output_folder(Path(options.output_dir or ""), options.overwrite_output_dir)
    trainer: AlignmentTrainer = METHODS.trainer(options)(
        args=options, train_dataset=training_data(options), eval_dataset=evaluation_data(options)
    )
    return trainer


def prepare(options: AlignmentConfig, machine: Machine) -> None:
    """Tokenize the data of a run with ``dry_run`` set, unless cached, and print the plan for ``machine``.

    Nothing is written to ``output_dir``, and other runs are neither waited for nor disturbed.
    """
    trainer = build_trainer(options)
    print("\n".join(dry_run_lines(trainer)), flush=True)
    tell(f"\nPlanned for {machine}. Tokenized rows are in {tokenized_folder()}")
    if trainer.engines.stores is not None:
        tell("The run computes the reference's log-probs, unless you run precompute on GPUs before")
    trainer.close()


def run(options: AlignmentConfig, *, precompute: bool = False) -> None:
    """Train, and write the model, the tokenizer, the state and the log to ``output_dir``.

    With ``precompute``, only compute and store the reference's log-probs; nothing is written to ``output_dir``.
    """
    trainer = build_trainer(options)
    if options.dry_run:
        print_dry_run(trainer)
        return
    if precompute:
        trainer.precompute()
        tell("to use the stored log-probs, train with ref_placement: precomputed")
        return
    unsaved: LastCheckpointError | None = None
    try:
        trainer.train()
    except LastCheckpointError as error:
        unsaved = error  # there may still be enough space for the model itself
    trainer.save_model()
    if trainer.data.eval and options.eval_strategy == "no":
        trainer.evaluate()
        trainer.write_report(show=False)  # again, with that evaluation
    trainer.save_state()
    tell(f"model, tokenizer, log.jsonl, {REPORT}, {PAGE} and more: {trainer.output_dir}")
    if trainer.method.task is CAUSAL_LM:
        tell(f"to chat with the model: deepspeed-alignment chat {trainer.output_dir}")
    trainer.close()
    if unsaved is not None:
        raise LastCheckpointError(f"{unsaved}; the model itself is saved in {trainer.output_dir}") from unsaved
