"""From parsed options to an aligned model on disk, or to the log-probs of its reference: where commands end."""

from __future__ import annotations

from pathlib import Path

from datasets import disable_progress_bars
from transformers.utils import logging as transformers_logging

from alignment.cli.dry_run import dry_run_lines, print_dry_run
from alignment.config.checks import check_command_line
from alignment.config.dtypes import Machine
from alignment.config.errors import LastCheckpointError
from alignment.config.options import AlignmentConfig
from alignment.config.registry import METHODS
from alignment.engines.launch_env import rank
from alignment.reporting.html.page import PAGE
from alignment.training.checkpointing.output_folder import check_output_folder
from alignment.training.data import evaluation_data, tokenised_folder, training_data
from alignment.training.summary import REPORT
from alignment.training.trainer import AlignmentTrainer


def build_trainer(options: AlignmentConfig) -> AlignmentTrainer:
    """The trainer of ``options.method`` with the datasets that the options name; nothing is loaded but rows."""
    check_command_line(options)
    if not options.resume_from_checkpoint and rank() == 0:  # a script could still resume when it calls train()
        check_output_folder(Path(options.output_dir or ""), options.overwrite_output_dir)
    trainer: AlignmentTrainer = METHODS.trainer(options)(
        args=options, train_dataset=training_data(options), eval_dataset=evaluation_data(options)
    )
    return trainer


def prepare(options: AlignmentConfig, machine: Machine) -> None:
    """Tokenise the data of a run, where the cache does not have them yet, and print how it is planned.

    Nothing is written into ``output_dir``, and no other run is waited for or disturbed.

    Args:
        options: the run's, ``dry_run`` among them.
        machine: what it is planned for.
    """
    _hide_bars(options)
    trainer = build_trainer(options)
    print("\n".join(dry_run_lines(trainer)), flush=True)
    trainer.tell(f"\nPlanned for {machine}. Tokenised rows are in {tokenised_folder()}")
    if trainer.engines.stores is not None:
        trainer.tell("The reference's log-probs are left to the run, or to the command precompute on GPUs")
    trainer.close()


def _hide_bars(options: AlignmentConfig) -> None:
    """Of loading, tokenising and writing, where none are wanted: they are the libraries', each rank's its own."""
    if options.disable_tqdm or options.process_index:
        disable_progress_bars()
        transformers_logging.disable_progress_bar()


def run(options: AlignmentConfig, *, precompute: bool = False) -> None:
    """Train, and write the model, the tokenizer, the state and the log into ``output_dir``.

    Args:
        options: the run's.
        precompute: fill the store of a precomputed reference instead; nothing is written into ``output_dir``.
    """
    _hide_bars(options)
    trainer = build_trainer(options)
    if options.dry_run:
        print_dry_run(trainer)
        return
    if precompute:
        trainer.precompute()
        trainer.tell("train with ref_placement: precomputed to use them")
        return
    unsaved: LastCheckpointError | None = None
    try:
        trainer.train()
    except LastCheckpointError as error:
        unsaved = error  # the model itself may still find room
    trainer.save_model()
    if trainer.eval_data and options.eval_strategy == "no":
        trainer.evaluate()
        trainer.write_report(show=False)  # once more, with that evaluation
    trainer.save_state()
    trainer.tell(f"model, tokenizer, log.jsonl, {REPORT}, {PAGE} and more: {trainer.output_dir}")
    trainer.close()
    if unsaved is not None:
        raise unsaved
