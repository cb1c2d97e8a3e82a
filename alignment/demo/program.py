"""The demo itself: start model, each method from it, samples, table, verdict."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import disable_progress_bars
from transformers.utils import logging as transformers_logging

from alignment.config.errors import AlignmentError
from alignment.demo import report
from alignment.demo.folder import clear, keep, kept_seconds, open_folder, start_key
from alignment.demo.judge import rates
from alignment.demo.rows import Row, make_world, start_rows
from alignment.demo.sampling import sample
from alignment.demo.settings import Settings
from alignment.demo.stages import VARIANTS, Variant, start_trainer, train, write_rows
from alignment.demo.verdict import Measured, missed
from alignment.trainers.base import AlignmentTrainer

EXAMPLES = 3
TRAINERS_OUTPUT = "trainers.txt"
_THREADS = 1  # with two, a third less time on an idle machine, and many times more on one where anything else runs


class Demo:
    """One run.

    Args:
        settings: sizes, rates and the seed.
        folder: for models, logs and the report.
        fresh: train the start model again, even if ``folder`` has one that could be used.
    """

    def __init__(self, settings: Settings, folder: Path, fresh: bool = False) -> None:
        self.settings, self.folder, self.fresh = settings, folder, fresh
        self.progress = sys.stderr.isatty()
        self.world = make_world(settings.seed, settings.held_out)
        self.measured: list[Measured] = []
        self.answers: dict[str, list[str]] = {}

    def run(self) -> None:
        """Run all of it, from an empty or an earlier folder to the table.

        Raises:
            AlignmentError: a promise was missed (the report is written all the same), or the folder cannot be used.
        """
        started = time.monotonic()
        open_folder(self.folder)
        (self.folder / TRAINERS_OUTPUT).unlink(missing_ok=True)
        # The bars of the libraries' loading and saving flash by; the trainers' own stay, on a terminal.
        disable_progress_bars()
        transformers_logging.disable_progress_bar()
        torch.set_num_threads(_THREADS)
        world, seed = self.world, self.settings.seed
        _say(f"seed {seed}: a world of {len(world.training)} requests to train on, and {len(world.held_out)} held out")
        self._measure("before", "start", self._start_model())
        for variant in VARIANTS:
            self._measure(variant.title, variant.name, self._train_variant(variant))
        faults = missed(self.measured[0], self.measured[1:])
        verdict = f"missed: {'; '.join(faults)}" if faults else "Every promise was kept."
        self._report(verdict)
        _say(f"{time.monotonic() - started:.0f} s in all")
        if faults:
            raise AlignmentError(f"the demo {verdict}; see {self.folder / 'demo.md'}")
        _say(verdict)

    def _start_model(self) -> float:
        """Make sure that there is a start model; return the seconds that its training took, now or earlier."""
        settings, folder = self.settings, self.folder / "start"
        rows = start_rows(self.world.training, settings.start.rows, settings.seed)
        key = start_key(rows, settings)
        seconds = None if self.fresh else kept_seconds(folder, key)
        if seconds is not None:
            _say(f"start model: {folder} is kept from an earlier run (--fresh trains it again)")
            return seconds
        _say(f"start model: supervised training from random weights, {len(rows)} answers, half warm and half curt")
        seconds = self._train_model("start", rows, lambda: start_trainer(folder, rows, settings, self.progress))
        keep(folder, key, seconds)
        return seconds

    def _train_variant(self, variant: Variant) -> float:
        """Train one model from the start model; return the seconds."""
        rows = variant.rows(self.world, self.settings)
        start, target = self.folder / "start", self.folder / variant.name
        _say(f"{variant.name}: {len(rows)} rows, from the start model")
        return self._train_model(
            variant.name, rows, lambda: variant.trainer(start, target, rows, self.settings, self.progress)
        )

    def _train_model(self, name: str, rows: list[Row], build: Callable[[], AlignmentTrainer]) -> float:
        clear(self.folder / name)
        write_rows(rows, self.folder / "data" / f"{name}.jsonl")
        seconds = train(build, self.folder / name, self.folder / TRAINERS_OUTPUT)
        _say(f"{name}: trained in {seconds:.0f} s")
        return seconds

    def _measure(self, title: str, name: str, seconds: float) -> None:
        """Sample from a saved model and add its row to the table."""
        texts = sample(self.folder / name, self.world.held_out, self.settings, self.progress)
        found = rates(self.world.held_out, texts)
        self.answers[title] = texts
        self.measured.append(Measured(title, found, seconds))
        _say(f"{title}: {found.warm:.3f} of the sampled answers are warm, {found.answered:.3f} answer the request")

    def _report(self, verdict: str) -> None:
        """Print the table and three answers of each model, and write the same and more into the folder."""
        held_out, folder = self.world.held_out, self.folder
        rates_table = report.table(self.measured)
        shown = report.examples(held_out[:EXAMPLES], self.answers)
        print(f"\n{rates_table}\n\n{shown}\n", flush=True)
        report.plot_margins({v.title: folder / v.name / "log.jsonl" for v in VARIANTS}, folder / "margins.png")
        write_rows(report.judged(held_out, self.answers), folder / "answers.jsonl")
        report.write_page(folder / "demo.md", self.settings, rates_table, verdict, shown)
        _say(f"{folder}/: demo.md, margins.png: this table and the reward margins; answers.jsonl: every answer")
        models = ", ".join(["start", *(variant.name for variant in VARIANTS)])
        _say(f"{folder}/: {models}: models, logs and reports; data: their rows; {TRAINERS_OUTPUT}: what was printed")
        _say(
            "with a model and rows of your own: python launch/train.py kto --model_name_or_path MODEL "
            f"--dataset_name FILE.jsonl --output_dir outputs/mine (rows as in {folder}/data/kto.jsonl)"
        )


def _say(text: str) -> None:
    print(text, flush=True)
