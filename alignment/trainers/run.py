"""The main job: from parsed options to an aligned model on disk. The command line ends here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from datasets import Dataset, disable_progress_bars
from transformers.utils import logging as transformers_logging

from alignment.config.checks import check_command_line
from alignment.config.options import AlignmentConfig
from alignment.data.sources import load_split
from alignment.trainers.base import AlignmentTrainer
from alignment.trainers.cpo import CPOTrainer
from alignment.trainers.dry_run import print_dry_run
from alignment.trainers.kto import KTOTrainer

TRAINERS: dict[str, type[AlignmentTrainer]] = {"kto": KTOTrainer, "cpo": CPOTrainer}


@dataclass(frozen=True)
class NamedSplit:
    """A split of ``dataset_name``, loaded by the one process of a machine that tokenises."""

    options: AlignmentConfig
    split: str

    @property
    def where(self) -> str:
        """For messages: the name of the data, and of the split where it is not the one to train on."""
        name = str(self.options.dataset_name)
        return name if self.split == self.options.dataset_train_split else f"{name} ({self.split})"

    def __call__(self) -> Dataset:
        assert self.options.dataset_name is not None
        return load_split(self.options.dataset_name, self.options.dataset_config, self.split)


def build_trainer(options: AlignmentConfig) -> AlignmentTrainer:
    """The trainer of ``options.method`` with the datasets that the options name; nothing is loaded but rows."""
    check_command_line(options)
    evaluation: Callable[[], Dataset] | None = None
    if options.dataset_test_split is not None:
        evaluation = NamedSplit(options, options.dataset_test_split)
    return TRAINERS[options.method](
        args=options, train_dataset=NamedSplit(options, options.dataset_train_split), eval_dataset=evaluation
    )


def run(options: AlignmentConfig) -> None:
    """Train, and write the model, the tokenizer, the state and the log into ``output_dir``."""
    if options.disable_tqdm or options.process_index:
        # The bars of loading, tokenising and writing: they are the libraries', and each rank would show its own.
        disable_progress_bars()
        transformers_logging.disable_progress_bar()
    trainer = build_trainer(options)
    if options.dry_run:
        print_dry_run(trainer)
        return
    trainer.train()
    if trainer.eval_data and options.eval_strategy == "no":
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(f"model, tokenizer, trainer_state.json and log.jsonl: {trainer.output_dir}", flush=True)
    trainer.close()
