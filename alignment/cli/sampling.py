"""Completions of a trained model, ranked as in Online DPO: the rows that methods train on, and comparisons of models.

Prompts are sampled in chunks, whose seeds depend on the number of the chunk only, so that the rows are the same on any
number of ranks. Every chunk is a line of a journal, from which an interrupted job continues.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from alignment.checkpoint.fingerprints import adapter_fingerprint, fingerprint, model_fingerprint
from alignment.checkpoint.trained_model import TrainedModel, find_model
from alignment.cli.train_job import hide_bars
from alignment.config.errors import DataError, OptionError, counted, refuse, setting
from alignment.data.kinds.prompts import PromptBatch, PromptRow, prompt_row
from alignment.engines.collectives import gathered, on_first_rank
from alignment.engines.rng import seeded
from alignment.methods.online_dpo import OnlineDPOTrainer
from alignment.methods.online_dpo_options import SampleConfig
from alignment.online.ranking import FirstAnswer, JudgeRanker
from alignment.online.window import SAMPLING, OnlineWindowPass, seeds_of
from alignment.reporting.log import JsonlLog, as_text
from alignment.reporting.page import Page, as_markdown
from alignment.reporting.run_content import COMPARISON, comparison_section
from alignment.reporting.run_view import read_lines
from alignment.rewards.samples import one_turn, spoken
from alignment.run.activity import ACTIVITY
from alignment.run.durable import replace_text, write_json
from alignment.run.protection import protected
from alignment.run.ranks import rank, tell, world_size
from alignment.training.data import training_data
from alignment.training.run_manifest import compared_options


class Sampled(NamedTuple):
    """A prompt and its completions."""

    source: PromptRow
    texts: Sequence[str]  #: the completions
    lengths: Sequence[int]  #: their numbers of tokens
    ended: Sequence[bool]  #: whether each ended with an end token
    scores: Sequence[float | None]  #: their rewards; with a judge, 1 for the one that it prefers, and 0 for the other
    outcome: Sequence[int] | str  #: see :class:`~alignment.online.ranking.Ranking`
    points: Sequence[float | None]  #: the first completion's, against that of each other model


class _Sampler(OnlineDPOTrainer):
    """A model that is sampled; ``options`` are without the model's."""

    config_class = SampleConfig
    args: SampleConfig

    def __init__(self, model: TrainedModel, options: SampleConfig) -> None:
        quantization = dict((model.adapter and model.quantization) or {})
        skips = not quantization.pop("experts", False) and bool(quantization.get("load_in_4bit"))  # as in training
        arguments = {"revision": model.revision, "quantization_config": quantization}
        arguments = {name: value for name, value in arguments.items() if value}
        args = replace(
            options, model_name_or_path=model.path, model_init_kwargs=arguments, bnb_4bit_skip_experts=skips
        )
        if model.adapter is not None:
            args = replace(args, use_peft=True, adapter_name_or_path=str(model.adapter.path))
        rewards = None if args.scored else lambda completions: [None] * len(completions)
        self.hidden = hide_bars(args)
        data, tokenizer = training_data(args), model.tokenizer()
        super().__init__(reward_funcs=rewards, args=args, eval_dataset=data, processing_class=tokenizer)

    def sample(self, folder: Path, others: Sequence[Mapping[int, FirstAnswer]] = ()) -> list[Sampled]:
        """Return completions of all prompts, compared with those of ``others``, and release the model. Collective.

        ``others`` are other models' completions by source row; ``folder`` has a journal for each set of settings.
        """
        engines, data = self.planned.engines, self.data.eval[""]
        adapter = None if engines.adapters is None else adapter_fingerprint(engines.adapters)
        settings = compared_options(self.args), self.resources.fingerprints(), data.key, others
        name = fingerprint([*settings, model_fingerprint(engines.source), adapter])
        journal, size, total = folder / f"{name}.jsonl", self.args.chunk_size, len(data.dataset)
        log, chunks = JsonlLog(journal if rank() == 0 else None), math.ceil(total / size)
        done = on_first_rank(lambda: len(read_lines(journal)))
        tell(f"{journal}: {min(done * size, total)} of {counted(total, 'prompt')} sampled")
        if done < chunks:
            self.build_engines()
            with protected(self.output_dir, self.args):
                rounds = range(done, chunks, world_size())
                for first in tqdm(rounds, "sampling", disable=self.hidden):
                    number = first + rank()
                    rows = range(number * size, min((number + 1) * size, total))  # none beyond the last chunk
                    for found in filter(None, gathered(self._chunk([*rows], number, others))):
                        log.write({"prompts": found})
                    ACTIVITY.progress()
                    if self.hidden:
                        tell(f"{min((first + world_size()) * size, total)} of {total} prompts sampled")
                on_first_rank(log.finish)
        self.close()
        found = [each for line in on_first_rank(lambda: read_lines(journal)) for each in line["prompts"]]
        return [Sampled(prompt_row(data.dataset, number), *each) for number, each in enumerate(found)]

    def _chunk(self, rows: list[int], number: int, others: Sequence[Mapping[int, FirstAnswer]]) -> list[Any]:
        """Return the attributes of :class:`Sampled`, but for the prompt, for some prompts, maybe none. Collective."""
        window_pass, data = self.engines.window_pass, self.data.eval[""]
        assert isinstance(window_pass, OnlineWindowPass)
        if others and isinstance(window_pass.ranker, JudgeRanker):
            window_pass.ranker.ask_twice()
        seeds = seeds_of(self.args.seed, SAMPLING, number)
        prompts = data.dataset[rows]["prompt_ids"] if rows else []
        batch = PromptBatch(tuple(rows), tuple(map(tuple, prompts)))
        groups, rankings = window_pass.answered([batch], data, seeds, None, self.args.num_generations)
        # A prompt that was too long for another model does not count.
        theirs = [[each.get(g.source.row, FirstAnswer(g.texts[0], None)) for g in groups] for each in others]
        with seeded(seeds.code):
            points = [window_pass.ranker.wins(groups, rankings, each, seeds.order) for each in theirs]
        found = []
        for group, ranking, *own in zip(groups, rankings, *points):
            made, outcome = group.completions, ranking.outcome
            lengths, ended = [len(one.ids) for one in made], [one.ended for one in made]
            judged = [None if isinstance(outcome, str) else float(number == outcome[0]) for number in range(len(made))]
            found.append([group.texts, lengths, ended, ranking.scores or judged, outcome, own])
        return found


def write_rows(options: SampleConfig, runs: Sequence[str]) -> None:
    """Sample a model and write the rows, and print a line about them. Collective."""
    if options.num_generations == 1 and options.threshold is None and (options.judge or options.rows != "completions"):
        refuse(options, "num_generations", "completions of a prompt are compared; set it to 2 or more")
    (run,) = runs
    folder = Path(run if Path(run).is_dir() else "")  # not for a Hub name
    out = Path(options.out or folder / f"{options.rows}.jsonl").expanduser()
    journals = out.with_name(f"{out.name}.samples")
    if out.exists() and not journals.exists():
        raise OptionError(f"{setting('out', str(out))}: exists and was not written by sample; set another file")
    found = _Sampler(find_model(run, "RUN", trust=options.trust_remote_code), options).sample(journals)
    rows = [row for each in found for row in rows_of(each, options)]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows if not isinstance(row, str)]
    reasons = Counter(row for row in rows if isinstance(row, str)).most_common()
    dropped = "; ".join(f"{count} × {why}" for why, count in reasons)
    if not lines:
        raise DataError(f"{out}: not written, as no rows are left ({dropped}); sample more, or use other rewards")
    on_first_rank(lambda: replace_text(out, "".join(lines)))
    scores = [score for each in found for score in each.scores if score is not None]
    length = statistics.fmean(length for each in found for length in each.lengths)
    ended = statistics.fmean(end for each in found for end in each.ended)
    parts = [f"{out}: {counted(len(lines), 'row')} of {counted(len(found), 'prompt')}"]
    parts += [f"dropped: {dropped}"] if dropped else []
    parts += [f"mean reward {statistics.fmean(scores):.4g}"] if scores and options.judge is None else []
    tell(", ".join([*parts, f"mean length {length:.1f} tokens", f"{ended:.0%} of the completions ended"]))


def rows_of(found: Sampled, options: SampleConfig) -> list[dict[str, Any] | str]:
    """Return the rows to train on of a prompt's completions, and for each that is dropped, the reason."""
    asked, outcome, scores = found.source.prompt, found.outcome, found.scores
    turns, template = [one_turn(asked, spoken(asked, text)) for text in found.texts], dict(found.source.template)
    columns = {"tools": template.pop("tools", None), "chat_template_kwargs": template}
    shared = {"prompt": turns[0][0], **{name: json.dumps(value) for name, value in columns.items() if value}}
    if options.rows == "pairs":
        if isinstance(outcome, str):
            return [outcome]
        better, worse = outcome
        high, low = scores[better] or 0.0, scores[worse] or 0.0
        pair: dict[str, Any] = {"chosen": turns[better][1], "rejected": turns[worse][1]}
        pair = shared | pair | {"chosen_score": high, "rejected_score": low}
        return [pair if high - low >= options.min_margin else "margin below min_margin"]
    rows: list[Any] = [shared | {"completion": completion} for _, completion in turns]
    if options.scored:
        rows = [row | {"score": score} for row, score in zip(rows, scores)]
    if options.rows == "completions":
        return rows
    median = statistics.median([score for score in scores if score is not None] or [0.0])
    bound = median if options.threshold is None else options.threshold
    reasons = {None: "unscored"} | ({median: "at the median"} if options.threshold is None else {})
    return [reasons.get(score) or row | {"label": (score or 0.0) >= bound} for row, score in zip(rows, scores)]


def compare(options: SampleConfig, runs: Sequence[str]) -> None:
    """Compare the first model with the others and with its start, write the result and print a table. Collective."""
    if not options.scored:
        refuse(options, "judge", "nothing compares the answers; set judge, reward_funcs or reward_model_path")
    given = [find_model(run, "RUN", trust=options.trust_remote_code) for run in runs]
    models = {model.found: model for model in (*given, given[0].start()) if model is not None}
    own, *others = models
    if not others:
        raise OptionError(f"RUN: what {own} started from is unknown; pass other models to compare it with")
    folder = Path(runs[0] if Path(runs[0]).is_dir() else "")  # not for a Hub name
    journals = folder / f"{COMPARISON}.samples"
    answers = [_Sampler(models[name], options).sample(journals) for name in others]
    firsts = [{one.source.row: FirstAnswer(one.texts[0], one.scores[0]) for one in each} for each in answers]
    ours = _Sampler(models[own], options).sample(journals, firsts)
    comparisons = [{"with": name, **statistics_of(ours, answers[n], n)} for n, name in enumerate(others)]
    result = {"run": own, "prompts": options.dataset_name, "comparisons": comparisons}
    on_first_rank(lambda: write_json(folder / COMPARISON, result))
    tell(as_markdown(Page(own, "Comparison", [comparison_section(result)], "")))


def statistics_of(ours: Sequence[Sampled], theirs: Sequence[Sampled], number: int) -> dict[str, Any]:
    """Return counts, win rate, means and examples of the answers of two models.

    Prompts that are too long for one of them do not count. ``number`` is the place of the other model in ``points``.
    """
    others = {other.source.row: other for other in theirs}
    pairs = [(one, others[one.source.row]) for one in ours if one.source.row in others]
    points = [one.points[number] for one, _ in pairs]
    known = [point for point in points if point is not None]
    scores = [[one.scores[0], other.scores[0]] for one, other in pairs]
    examples = [
        {"prompt": as_text(one.source.prompt), "answers": [one.texts[0], other.texts[0]], "scores": score}
        for (one, other), score in zip(pairs, scores)
        if one.texts != other.texts
    ]
    return {
        "prompts": len(points),
        **{name: points.count(point) for name, point in (("wins", 1.0), ("ties", 0.5), ("losses", 0.0))},
        "win_rate": statistics.fmean(known) if known else None,
        "interval": wilson(statistics.fmean(known), len(known)) if known else None,
        "mean_lengths": [statistics.fmean(one.lengths[0] for one in side) for side in zip(*pairs)],
        "mean_rewards": [statistics.fmean(side) for side in zip(*(each for each in scores if None not in each))],
        "examples": sorted(examples, key=_difference, reverse=True)[:10],
    }


def _difference(example: dict[str, Any]) -> float:
    """How different two answers are: by their scores, or else by their numbers of characters."""
    one, other = map(len, example["answers"]) if None in example["scores"] else example["scores"]
    return float(abs(one - other))


def wilson(rate: float, count: int) -> tuple[float, float]:
    """Return the 95% score interval of a share of ``count`` items (Wilson 1927, JASA 22, 209-212)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    middle, scale = rate + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
