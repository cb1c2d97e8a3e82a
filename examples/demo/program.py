"""The demo: train the models, sample from them, print the table, and check the targets."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from datasets import disable_progress_bars
from transformers.utils import logging as transformers_logging

from alignment.config.errors import AlignmentError
from examples.demo import report
from examples.demo.data import Row, make_world, paired_rows
from examples.demo.folder import Settings, clear, keep, kept_seconds, model_key, open_folder, write_rows
from examples.demo.measuring import accuracy, rewards, sample
from examples.demo.training import PREPARED, REWARD, START, VARIANTS, Job, Stage, train
from examples.demo.verdict import Measured, missed, rates

EXAMPLES = 3
TRAINERS_OUTPUT = "trainers.txt"
_THREADS = 1  # two threads are a third faster on an idle machine, and many times slower on a busy one


class Demo:
    """One run of the demo.

    Args:
        settings: sizes, rates and the seed.
        folder: the output folder for models, logs and the report.
        fresh: retrain the initial model and the reward model even if ``folder`` has valid ones.
    """

    def __init__(self, settings: Settings, folder: Path, fresh: bool = False) -> None:
        self.settings, self.folder, self.fresh = settings, folder, fresh
        self.progress = sys.stderr.isatty()
        self.world = make_world(settings.seed, settings.held_out)
        self.measured: list[Measured] = []
        self.answers: dict[str, list[str]] = {}
        self.rewards: dict[str, list[float]] = {}
        self.accuracy = 0.0

    def run(self) -> None:
        """Run the whole demo, in an empty folder or one of an earlier demo.

        Raises:
            AlignmentError: if a target is not met (the report is still written), or the folder cannot be used.
        """
        started = time.monotonic()
        open_folder(self.folder)
        (self.folder / TRAINERS_OUTPUT).unlink(missing_ok=True)
        # Hide the short progress bars of loading and saving; those of the trainers are shown on a terminal.
        disable_progress_bars()
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()  # it warns of the reward model's new head, which is intended
        torch.set_num_threads(_THREADS)
        world, seed = self.world, self.settings.seed
        _say(f"seed {seed}: {len(world.training)} training requests, {len(world.held_out)} held-out requests")
        took, key = {}, ""
        for stage in PREPARED:
            key, took[stage.name] = self._prepared(stage, key)
        self._check_reward_model()
        self._measure(START, took[START.name])
        for stage in VARIANTS:
            self._measure(stage, self._train(stage, stage.rows(world, self.settings)))
        faults = missed(self.measured[0], self.measured[1:], self.accuracy)
        verdict = f"targets not met: {'; '.join(faults)}" if faults else "All targets are met."
        self._report(verdict)
        _say(f"total time: {time.monotonic() - started:.0f} s")
        if faults:
            raise AlignmentError(f"demo: {verdict}; see {self.folder / 'demo.md'}")
        _say(verdict)

    def _prepared(self, stage: Stage, before: str) -> tuple[str, float]:
        """Train a model that others depend on, or reuse a saved one.

        Args:
            stage: the model's stage.
            before: the key of the model that training starts from.

        Returns:
            Its key, and its training time in seconds, now or earlier.
        """
        folder, rows = self.folder / stage.name, stage.rows(self.world, self.settings)
        key = model_key(stage.name, rows, self.settings, before)
        seconds = None if self.fresh else kept_seconds(folder, key)
        if seconds is None:
            seconds = self._train(stage, rows)
            keep(folder, key, seconds)
        else:
            _say(f"{stage.name}: reusing {folder} from an earlier run (--fresh retrains it)")
        return key, seconds

    def _check_reward_model(self) -> None:
        """Measure how often the reward model ranks a pair for a held-out request correctly."""
        held_out = self.world.held_out
        self.accuracy = accuracy(self.folder / REWARD.name, paired_rows(held_out, len(held_out), self.settings.seed))
        _say(f"{REWARD.title}: accuracy {self.accuracy:.3f} on {len(held_out)} held-out pairs")

    def _train(self, stage: Stage, rows: list[Row]) -> float:
        """Train one model; return the duration in seconds."""
        job = Job(self.folder, stage.name, rows, self.settings, self.progress)
        _say(f"{stage.name}: training on {len(rows)} rows: {stage.about}")
        clear(job.folder)
        write_rows(rows, self.folder / "data" / f"{stage.name}.jsonl")
        seconds = train(stage.trainer, job, self.folder / TRAINERS_OUTPUT)
        _say(f"{stage.name}: trained in {seconds:.0f} s")
        return seconds

    def _measure(self, stage: Stage, seconds: float) -> None:
        """Sample from a saved model, and add its row to the table."""
        title, held_out = stage.title, self.world.held_out
        texts = sample(self.folder / stage.name, held_out, self.settings, self.progress)
        found, scores = rates(held_out, texts), rewards(self.folder / REWARD.name, held_out, texts)
        self.answers[title], self.rewards[title] = texts, scores
        self.measured.append(Measured(title, found, sum(scores) / len(scores), seconds, stage.targets))
        _say(
            f"{title}: {found.warm:.3f} of the sampled responses are warm, {found.answered:.3f} are correct; "
            f"mean reward {self.measured[-1].reward:.2f}"
        )

    def _report(self, verdict: str) -> None:
        """Print the table and examples of responses, and write the report."""
        held_out, folder = self.world.held_out, self.folder
        rates_table = report.table(self.measured)
        shown = report.examples(held_out[:EXAMPLES], self.answers)
        print(f"\n{rates_table}\n\n{shown}\n", flush=True)
        report.plot_margins({v.title: folder / v.name / "log.jsonl" for v in VARIANTS}, folder / "margins.png")
        write_rows(report.judged(held_out, self.answers, self.rewards), folder / "answers.jsonl")
        meaning = report.explained(self.settings, self.accuracy)
        report.write_page(folder / "demo.md", meaning, rates_table, verdict, shown)
        _say(f"{folder}/: demo.md and margins.png: this table and the reward margins; answers.jsonl: all responses")
        models = ", ".join(stage.name for stage in (*PREPARED, *VARIANTS))
        _say(f"{folder}/: {models}: models, logs and reports; data: their rows; {TRAINERS_OUTPUT}: trainer output")
        _say(
            "to train on your own data: python launch/train.py kto --model_name_or_path MODEL "
            f"--dataset_name FILE.jsonl --output_dir outputs/mine (for rows like those in {folder}/data/kto.jsonl)"
        )


def _say(text: str) -> None:
    print(text, flush=True)
