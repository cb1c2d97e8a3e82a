"""Completions of a trained model for prompts, ranked as in Online DPO, and the rows that methods train on.

Prompts are sampled in chunks, whose seeds depend on the number of the chunk only, so that the rows are the same on any
number of ranks. Every chunk is a line of a journal, from which a job that was interrupted continues.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alignment.checkpoint.fingerprints import without_path
from alignment.checkpoint.trained_model import TrainedModel
from alignment.config.errors import OptionError, OutputError, counted
from alignment.config.options_model import FOUR_BITS
from alignment.config.options_online import SampleConfig, SamplingConfig
from alignment.data.kinds.base import TEMPLATE
from alignment.data.kinds.prompts import PROMPTS, PromptRow, prompt_row
from alignment.engines.collectives import gathered, on_first_rank
from alignment.engines.rng import seeded
from alignment.online.completions import Generated
from alignment.online.ranking import FirstAnswer, Ranking
from alignment.online.resources import OnlineResources
from alignment.online.window import MEASURED, OnlineWindowPass, Seeds
from alignment.reporting.log import as_text
from alignment.reporting.metrics import MetricHistory, MetricSums
from alignment.reporting.progress import Progress
from alignment.reporting.run_view import read_lines
from alignment.rewards.samples import one_turn, spoken
from alignment.run.activity import ACTIVITY
from alignment.run.durable import replace_text
from alignment.run.protection import protected
from alignment.run.ranks import rank, tell, world_size
from alignment.training.data import PreparedData, training_data
from alignment.training.method import Method, RowLosses
from alignment.training.run_manifest import compared_options, run_fingerprints
from alignment.training.trainer import AlignmentTrainer

_STREAM = 5  # of random numbers, other than those of training, evaluation and its tables of completions


class _Sampling(Method[Any]):
    """Prompts and completions without a loss."""

    kind = PROMPTS
    metrics = MEASURED

    def scored(self, batch: Any) -> Any:
        raise NotImplementedError

    def losses(self, *arguments: Any) -> RowLosses:
        raise NotImplementedError


class Sampled(NamedTuple):
    """A prompt's completions.

    Attributes:
        row: index of the prompt in the tokenized dataset.
        texts: the completions.
        lengths: their numbers of tokens.
        scores: one per completion, None where scoring failed; None altogether with a judge.
        outcome: see :class:`~alignment.online.ranking.Ranking`.
    """

    row: int
    texts: list[str]
    lengths: list[int]
    scores: list[float | None] | None
    outcome: list[int] | str


class Sampler(AlignmentTrainer):
    """A model that is not trained, only sampled.

    Args:
        model: the model.
        options: the options, without the model's.
    """

    config_class = SamplingConfig
    method_class = _Sampling
    args: SamplingConfig

    def __init__(self, model: TrainedModel, options: SamplingConfig) -> None:
        given = {**options.to_dict(), **_options_of(model, options)}
        del given["method"]
        args = type(options)(**given)
        super().__init__(args=args, eval_dataset=training_data(args), processing_class=model.tokenizer())

    def _resources(self) -> OnlineResources:
        engines, required = self.planned.engines, self.args.has_rewards or self.args.judge is not None
        return OnlineResources(
            self.args,
            engines.dtypes,
            engines.policy["zero_optimization"]["stage"],
            retries=self.retries,
            cards=engines.cards,
            required=required,
        )

    @property
    def prompts(self) -> PreparedData:
        """The tokenized prompts."""
        return self.data.eval[""]

    def sample(self, journal: Path) -> None:
        """Sample and rank completions of all prompts that are not in the journal yet, and add them to it. Collective.

        Raises:
            OptionError: the journal was begun with other settings.
            OutputError: it cannot be written.
        """
        fingerprints = run_fingerprints(self.context, self.planned.engines, None, self.resources)
        settings = compared_options(self.args) | {name: without_path(text) for name, text in fingerprints.items()}
        settings["prompts"] = settings.pop("evaluation data")
        size, total = self.args.chunk_size, len(self.prompts.dataset)
        done, chunks = on_first_rank(lambda: _begun(journal, settings)), math.ceil(total / size)
        if done:
            tell(f"{journal}: {min(done * size, total)} of {counted(total, 'prompt')} are already sampled")
        if done == chunks:
            return
        self.build_engines()
        with protected(self.output_dir, self.args):
            shown = self.context.is_first and not self.args.disable_tqdm
            progress = Progress(chunks, "chunks", shown, self.engines.window_pass.device, done)
            for first in range(done, chunks, world_size()):
                number = first + rank()
                rows = range(number * size, min((number + 1) * size, total))  # none beyond the last chunk
                new = [json.dumps(each) for each in gathered(self._chunk(list(rows), number)) if each["prompts"]]
                on_first_rank(functools.partial(_append, journal, new))
                ACTIVITY.progress()
                for _ in new:
                    progress.advance()
            progress.close()

    def answers(self, journal: Path) -> dict[int, Sampled]:
        """Return what a complete journal has for each row of the user's data. Collective."""
        read = on_first_rank(lambda: read_journal(journal)[0])
        return {prompt_row(self.prompts.dataset, each.row).row: each for each in read}

    def prompt(self, sampled: Sampled) -> str:
        """Return a prompt as text."""
        return str(as_text(prompt_row(self.prompts.dataset, sampled.row).prompt))

    def points(self, ours: Sequence[Sampled], theirs: Sequence[Sampled]) -> list[float | None]:
        """Return 1, 0.5 or 0 for each prompt of this sampler: ours is better than, as good as or worse than theirs.

        Only the first completions are compared. A judge is asked in both orders: if its verdicts differ, it is a tie,
        and without two verdicts, the result is None. Collective.
        """
        resources, data, first = self.resources, self.prompts, rank()
        assert isinstance(resources, OnlineResources)
        seed = int(np.random.SeedSequence([self.args.seed, _STREAM, first]).generate_state(1)[0])
        share = [list(each[first :: world_size()]) for each in (ours, theirs)]
        places = [(each.row, prompt_row(data.dataset, each.row), data.place(each.row)) for each in share[0]]

        def wins(one: Sequence[Sampled], other: Sequence[Sampled]) -> list[float | None]:
            groups = [Generated(*place, (), (), tuple(each.texts)) for place, each in zip(places, one)]
            rankings = [Ranking("", None if each.scores is None else tuple(each.scores)) for each in one]
            scores = (None if each.scores is None else each.scores[0] for each in other)
            firsts = [FirstAnswer(each.texts[0], score) for each, score in zip(other, scores)]
            return resources.ranker.wins(groups, rankings, firsts, seed)

        with protected(self.output_dir, self.args), seeded(seed):
            both = zip(wins(*share), wins(*reversed(share)))
            own = [None if win is None or loss is None else (win + 1 - loss) / 2 for win, loss in both]
        everyone = gathered(own)
        return [everyone[number % world_size()][number // world_size()] for number in range(len(ours))]

    def _chunk(self, rows: list[int], number: int) -> dict[str, Any]:
        """Return the completions of a chunk, possibly of no rows, and its metrics. Collective."""
        window_pass, data = self.engines.window_pass, self.prompts
        assert isinstance(window_pass, OnlineWindowPass)
        seeds = Seeds(*map(int, np.random.SeedSequence([self.args.seed, _STREAM, number]).generate_state(3)))
        sums = MetricSums(window_pass.names, window_pass.device, first_rank=True)
        prompts = data.dataset[rows]["prompt_ids"] if rows else []
        groups, rankings = window_pass.answered(rows, prompts, data, seeds, sums, self.args.num_generations)
        window_pass.measure(groups, rankings, sums)
        found = [
            Sampled(group.row, list(group.texts), [len(one.ids) for one in group.completions],
                    None if ranking.scores is None else list(ranking.scores),
                    ranking.outcome if isinstance(ranking.outcome, str) else list(ranking.outcome))
            for group, ranking in zip(groups, rankings, strict=True)
        ]  # fmt: skip
        return {"metrics": {name: item for name, item in sums.items().items() if item[1]}, "prompts": found}


def _options_of(model: TrainedModel, options: SamplingConfig) -> dict[str, Any]:
    """Return the options that load a model as it was trained."""
    given: dict[str, Any] = {"model_name_or_path": model.path}
    if model.revision is not None:
        given["model_init_kwargs"] = {"revision": model.revision}
    if model.adapter is not None:
        given |= {"use_peft": True, "adapter_name_or_path": str(model.adapter.path)}
        quantization = model.adapter.quantization or {}
        given |= {name: True for name in ("load_in_4bit", "load_in_8bit") if quantization.get(name)}
    if given.get("load_in_4bit"):
        given |= {name: model.options[name] for name in FOUR_BITS if model.options.get(name) is not None}
    return given


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"out: cannot write {path}: {error}") from error


def _begun(journal: Path, settings: Mapping[str, Any]) -> int:
    """Begin a journal, or check its settings and cut off an incomplete line; return its number of chunks."""
    with _writing(journal):
        if not journal.exists():
            journal.parent.mkdir(parents=True, exist_ok=True)
            replace_text(journal, json.dumps(settings) + "\n")
        known, *chunks = read_lines(journal) or [{}]
        with journal.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    differ = [name for name in {**known, **settings} if known.get(name) != settings.get(name)]
    if differ or not all(chunks):
        why = f"was begun with other settings ({', '.join(differ)})" if differ else "is damaged"
        raise OptionError(f"out: {journal} {why}; remove it to sample again, or set another out")
    return len(chunks)


def _append(journal: Path, lines: list[str]) -> None:
    with _writing(journal), journal.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def read_journal(journal: Path) -> tuple[list[Sampled], dict[str, float]]:
    """Return the prompts of a complete journal, and the means of its metrics."""
    history, found = MetricHistory(), []
    for chunk in read_lines(journal)[1:]:
        history.add({name: (total, count) for name, (total, count) in chunk["metrics"].items()})
        found += [Sampled(*each) for each in chunk["prompts"]]
    return found, history.pop()


def write_rows(sampler: Sampler, journal: Path, out: Path, options: SampleConfig) -> str:
    """Write the rows of a complete journal; return a line about them. For one rank."""
    found, metrics = read_journal(journal)
    lines, dropped = [], Counter(sampler.prompts.report.dropped)
    for each in found:
        for row in rows_of(prompt_row(sampler.prompts.dataset, each.row), each, options):
            if isinstance(row, str):
                dropped[row] += 1
            else:
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    with _writing(out):
        replace_text(out, "".join(lines))
    parts = [f"{counted(len(lines), 'row')} of {counted(len(found), 'prompt')}"]
    parts += [f"dropped: {'; '.join(f'{count} × {why}' for why, count in dropped.most_common())}"] if dropped else []
    own = [name for name in metrics if name.startswith("rewards/") and name.endswith("/mean")]
    rewards = {"mean reward": "objective/scores"} | {name.split("/")[1]: name for name in own if len(own) > 1}
    parts += [f"{label} {metrics[name]:.4g}" for label, name in rewards.items() if name in metrics]
    parts.append(f"mean length {metrics['completions/mean_length']:.1f} tokens")
    parts.append(f"{metrics['val/contain_eos_token']:.0%} of the completions ended")
    return f"{out}: {', '.join(parts)}"


def rows_of(source: PromptRow, found: Sampled, options: SampleConfig) -> Iterator[dict[str, Any] | str]:
    """Yield the rows to train on of a prompt's completions, and for each that is dropped, the reason."""
    turns = [one_turn(source.prompt, spoken(source.prompt, text)) for text in found.texts]
    variables = dict(source.template)
    more = {"tools": variables.pop("tools", None), "chat_template_kwargs": variables}
    template = {name: json.dumps(more[name]) for name in TEMPLATE if more[name]}
    scores, outcome = found.scores, found.outcome

    def row(number: int, **columns: Any) -> dict[str, Any]:
        return {"prompt": turns[number][0], **columns, **template}

    def score(number: int, name: str = "score") -> dict[str, float | None]:
        return {name: scores[number]} if scores is not None and options.has_rewards else {}

    if options.rows == "pairs" and not isinstance(outcome, str):
        better, worse = outcome
        each = score(better, "chosen_score") | score(worse, "rejected_score")
        high, low = each.get("chosen_score"), each.get("rejected_score")
        if high is not None and low is not None and high - low < options.min_margin:
            yield "margin below min_margin"
        else:
            yield row(better, chosen=turns[better][1], rejected=turns[worse][1], **each)
    elif options.rows == "pairs":
        yield str(outcome)
    else:
        labels = None if options.rows == "completions" else labels_of(found, options.threshold)
        for number, (_, completion) in enumerate(turns):
            label = {} if labels is None else {"label": labels[number]}
            reason = label.get("label")
            if isinstance(reason, str):
                yield reason
            else:
                yield row(number, completion=completion, **label, **score(number))


def labels_of(found: Sampled, threshold: float | None) -> list[bool | str]:
    """Return whether each completion is desirable, or why it has no label.

    Without a threshold, those above the median of the prompt's scores are desirable and those below are not. A judge
    prefers one of two.
    """
    if found.scores is None:
        judged = found.outcome
        return [judged if isinstance(judged, str) else number == judged[0] for number in range(len(found.texts))]
    known = [score for score in found.scores if score is not None]
    middle = statistics.median(known) if known else 0.0
    labels: list[bool | str] = []
    for score in found.scores:
        if score is None:
            labels.append("unscored")
        elif threshold is not None:
            labels.append(score >= threshold)
        else:
            labels.append("at the median" if score == middle else score > middle)
    return labels
