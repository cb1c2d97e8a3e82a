"""Completions of a trained model, ranked as in Online DPO: the rows that methods train on, and comparisons of models.

Prompts are sampled in chunks, whose seeds depend on the number of the chunk only, so that the rows are the same on any
number of ranks. Every chunk is a line of a journal, from which an interrupted job continues.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from alignment.checkpoint.fingerprints import adapter_fingerprint, fingerprint, model_fingerprint
from alignment.checkpoint.trained_model import TrainedModel, find_model
from alignment.config.errors import OptionError, counted, refuse, setting
from alignment.data.kinds.base import TEMPLATE
from alignment.data.kinds.prompts import PromptBatch
from alignment.data.messages import Text
from alignment.engines.collectives import gathered, on_first_rank
from alignment.engines.rng import seeded
from alignment.methods.online_dpo import OnlineDPOMethod, OnlineDPOTrainer
from alignment.methods.online_dpo_options import SampleConfig
from alignment.online.completions import Generated
from alignment.online.ranking import FirstAnswer, Ranker, Ranking, RewardRanker
from alignment.online.window import OnlineWindowPass, Seeds
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

_STREAM = 5  # of random numbers, other than those of training, evaluation and its tables of completions


class Sampled(NamedTuple):
    """A prompt and its completions."""

    row: int  #: the source row, counted from 0
    prompt: Text  #: text or messages
    template: Mapping[str, Any]  #: variables for the chat template
    texts: Sequence[str]  #: the completions
    lengths: Sequence[int]  #: their numbers of tokens
    ended: Sequence[bool]  #: whether each ended with an end token
    scores: Sequence[float | None] | None  #: one per completion; None altogether with a judge
    outcome: Sequence[int] | str  #: see :class:`~alignment.online.ranking.Ranking`
    points: Sequence[float | None]  #: the first completion's, against that of each other model

    @property
    def first(self) -> FirstAnswer:
        """The first completion."""
        return FirstAnswer(self.texts[0], self.scores[0] if self.scores else None)


class _Sampling(OnlineDPOMethod):
    """Online DPO without training."""

    needs_reference = False


class _Sampler(OnlineDPOTrainer):
    """A model that is sampled; ``options`` are without the model's."""

    config_class = SampleConfig
    method_class = _Sampling
    args: SampleConfig

    def __init__(self, model: TrainedModel, options: SampleConfig) -> None:
        given: dict[str, Any] = {"model_name_or_path": model.path}
        arguments: dict[str, Any] = {"revision": model.revision} if model.revision else {}
        if model.adapter is not None:
            given |= {"use_peft": True, "adapter_name_or_path": str(model.adapter.path)}
            arguments |= {"quantization_config": dict(model.quantization)} if model.quantization else {}
        args = replace(options, model_init_kwargs=arguments, **given)
        rewards = None if args.has_rewards or args.judge else lambda completions: [None] * len(completions)
        data, tokenizer = training_data(args), model.tokenizer()
        super().__init__(reward_funcs=rewards, args=args, eval_dataset=data, processing_class=tokenizer)

    def sample(self, folder: Path, others: Sequence[Mapping[int, Sampled]] = ()) -> list[Sampled]:
        """Return completions of all prompts, compared with those of ``others``, and release the model. Collective.

        ``others`` are completions of other models by source row; ``folder`` has a journal for each set of settings.
        """
        engines, data = self.planned.engines, self.data.eval[""]
        adapter = None if engines.adapters is None else adapter_fingerprint(engines.adapters)
        settings = compared_options(self.args), self.resources.fingerprints(), data.key, others
        name = fingerprint([*settings, model_fingerprint(engines.source), adapter])
        journal, size, total = folder / f"{name}.jsonl", self.args.chunk_size, len(data.dataset)
        log, chunks = JsonlLog(journal if rank() == 0 else None), math.ceil(total / size)
        done = on_first_rank(lambda: len(read_lines(journal)))
        tell(f"{journal}: {min(done * size, total)} of {counted(total, 'prompt')} are already sampled")
        if done < chunks:
            self.build_engines()
            with protected(self.output_dir, self.args):
                rounds = range(done, chunks, world_size())
                for first in tqdm(rounds, "sampling", disable=rank() > 0 or self.args.disable_tqdm):
                    number = first + rank()
                    rows = range(number * size, min((number + 1) * size, total))  # none beyond the last chunk
                    for found in filter(None, gathered(self._chunk([*rows], number, others))):
                        log.write({"prompts": found})
                    ACTIVITY.progress()
                on_first_rank(log.finish)
        self.close()
        return [Sampled(*each) for line in on_first_rank(lambda: read_lines(journal)) for each in line["prompts"]]

    def _chunk(self, rows: list[int], number: int, others: Sequence[Mapping[int, Sampled]]) -> list[Sampled]:
        """Return the completions of some prompts, possibly none. Collective."""
        window_pass, data = self.engines.window_pass, self.data.eval[""]
        assert isinstance(window_pass, OnlineWindowPass)
        seeds = Seeds(*map(int, np.random.SeedSequence([self.args.seed, _STREAM, number]).generate_state(3)))
        prompts = data.dataset[rows]["prompt_ids"] if rows else []
        batch = PromptBatch(tuple(rows), tuple(map(tuple, prompts)))
        groups, rankings = window_pass.answered([batch], data, seeds, None, self.args.num_generations)
        with seeded(seeds.code):
            points = [_points(window_pass.ranker, groups, rankings, each, seeds.order) for each in others]
        found = []
        for place, (group, ranking) in enumerate(zip(groups, rankings)):
            source, made, own = group.source, group.completions, [each[place] for each in points]
            lengths, ended = [len(one.ids) for one in made], [one.ended for one in made]
            about = source.row, source.prompt, source.template
            found.append(Sampled(*about, group.texts, lengths, ended, ranking.scores, ranking.outcome, own))
        return found


def _points(
    ranker: Ranker, groups: Sequence[Generated], rankings: Sequence[Ranking], others: Mapping[int, Sampled], seed: int
) -> list[float | None]:
    """Return 1, 0.5 or 0 per prompt: its first completion is better than, as good as or worse than the other's.

    A judge is asked in both orders: if its verdicts differ, it is a tie. None without scores or two verdicts.
    """
    ours = [FirstAnswer(group.texts[0], None) for group in groups]
    theirs = [others[g.source.row].first if g.source.row in others else own for g, own in zip(groups, ours)]
    wins = ranker.wins(groups, rankings, theirs, seed)
    if isinstance(ranker, RewardRanker):
        return wins
    losses = ranker.wins([replace(g, texts=(one.text,)) for g, one in zip(groups, theirs)], rankings, ours, seed)
    return [None if win is None or loss is None else (win + 1 - loss) / 2 for win, loss in zip(wins, losses)]


def write_rows(options: SampleConfig, runs: Sequence[str]) -> None:
    """Sample a model and write the rows, and print a line about them. Collective."""
    if options.rows == "completions" and options.judge is not None:
        refuse(options, "judge rows", "a judge gives no scores to write; remove it, or set rows to pairs or unpaired")
    (run,) = runs
    folder = Path(run if Path(run).is_dir() else "")  # not for a Hub name
    out = Path(options.out or folder / f"{options.rows}.jsonl").expanduser()
    journals = out.with_name(f"{out.name}.samples")
    if out.exists() and not journals.exists():
        raise OptionError(f"{setting('out', str(out))}: exists and was not written by sample; set another file")
    found = _Sampler(find_model(run, "RUN", trust=options.trust_remote_code), options).sample(journals)
    rows = [row for each in found for row in rows_of(each, options)]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows if not isinstance(row, str)]
    on_first_rank(lambda: replace_text(out, "".join(lines)))
    dropped = Counter(row for row in rows if isinstance(row, str)).most_common()
    scores = [score for each in found for score in each.scores or () if score is not None]
    length = statistics.fmean(length for each in found for length in each.lengths)
    ended = statistics.fmean(end for each in found for end in each.ended)
    parts = [f"{out}: {counted(len(lines), 'row')} of {counted(len(found), 'prompt')}"]
    parts += [f"dropped: {'; '.join(f'{count} × {why}' for why, count in dropped)}"] if dropped else []
    parts += [f"mean reward {statistics.fmean(scores):.4g}"] if scores else []
    tell(", ".join([*parts, f"mean length {length:.1f} tokens", f"{ended:.0%} of the completions ended"]))


def rows_of(found: Sampled, options: SampleConfig) -> list[dict[str, Any] | str]:
    """Return the rows to train on of a prompt's completions, and for each that is dropped, the reason.

    Without a threshold, completions above the median of the prompt's scores are desirable, and those below are not.
    """
    turns = [one_turn(found.prompt, spoken(found.prompt, text)) for text in found.texts]
    variables, outcome = dict(found.template), found.outcome
    more = dict(zip(TEMPLATE, (variables.pop("tools", None), variables)))
    template = {name: json.dumps(value) for name, value in more.items() if value}
    scores = found.scores if options.has_rewards else None
    if options.rows == "pairs":
        if isinstance(outcome, str):
            return [outcome]
        (prompt, chosen), (_, rejected) = (turns[number] for number in outcome)
        pair: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected, **template}
        if scores is not None:
            high, low = (scores[number] or 0.0 for number in outcome)
            if high - low < options.min_margin:
                return ["margin below min_margin"]
            pair |= {"chosen_score": high, "rejected_score": low}
        return [pair]
    rows: list[Any] = [{"prompt": prompt, "completion": completion, **template} for prompt, completion in turns]
    if scores is not None:
        rows = [row | {"score": score} for row, score in zip(rows, scores)]
    if options.rows == "completions":
        return rows
    labels: list[bool | str]
    if scores is None:  # of a judge, which prefers one of two
        labels = [outcome if isinstance(outcome, str) else number == outcome[0] for number in range(len(rows))]
    else:
        reasons: dict[float | None, str] = {None: "unscored"}
        if (bound := options.threshold) is None:
            bound = statistics.median([score for score in scores if score is not None] or [0.0])
            reasons[bound] = "at the median"
        labels = [reasons.get(score) or (score or 0.0) >= bound for score in scores]
    return [label if isinstance(label, str) else row | {"label": label} for row, label in zip(rows, labels)]


def compare(options: SampleConfig, runs: Sequence[str], as_json: bool) -> None:
    """Compare the first model with the others and with its start; write and print the result. Collective."""
    if not options.has_rewards and options.judge is None:
        refuse(options, "judge", "nothing compares the answers; set judge, reward_funcs or reward_model_path")
    if isinstance(options.judge, dict):  # each pair is shown in both orders here
        options = replace(options, judge={**options.judge, "both_orders": False})
    models = {name: find_model(name, "RUN", trust=options.trust_remote_code) for name in runs}
    own, *others = runs
    start = models[own].start()
    if start is not None and start.found not in [model.found for model in models.values()]:
        others.append(f"{start.found} (start)")
        models[others[-1]] = start
    if not others:
        raise OptionError(f"RUN: what {own} started from is unknown; pass the models to compare it with")
    folder = Path(own if Path(own).is_dir() else "")  # not for a Hub name
    journals = folder / f"{COMPARISON}.samples"
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        answers = [{one.row: one for one in _Sampler(models[name], options).sample(journals)} for name in others]
        ours = _Sampler(models[own], options).sample(journals, answers)
    compared = [statistics_of(ours, theirs, number) for number, theirs in enumerate(answers)]
    comparisons = [{"with": name, **each} for name, each in zip(others, compared)]
    result = {"run": own, "prompts": options.dataset_name, "comparisons": comparisons}
    on_first_rank(lambda: write_json(folder / COMPARISON, result))
    section = comparison_section(result)
    page = Page(own, "Comparison", [section._replace(cards=section.cards[:1])], "")
    tell(json.dumps(result, ensure_ascii=False) if as_json else as_markdown(page))


def statistics_of(ours: Sequence[Sampled], others: Mapping[int, Sampled], number: int) -> dict[str, Any]:
    """Return counts, win rate, means and examples of the answers of two models.

    Prompts that are too long for one of them do not count. ``number`` is the place of the other model in ``points``.
    """
    pairs = [(one, others[one.row]) for one in ours if one.row in others]
    points = [one.points[number] for one, _ in pairs]
    known = [point for point in points if point is not None]
    scores = [[one.first.score, other.first.score] for one, other in pairs]
    scored = [each for each in scores if None not in each]
    examples = [
        {"prompt": as_text(one.prompt), "answers": [one.texts[0], other.texts[0]], "scores": score, "points": point}
        for (one, other), score, point in zip(pairs, scores, points)
        if one.texts != other.texts
    ]
    return {
        "prompts": len(points),
        "wins": sum(point > 0.5 for point in known),
        "ties": known.count(0.5),
        "losses": sum(point < 0.5 for point in known),
        "undecided": points.count(None),
        "win_rate": statistics.fmean(known) if known else None,
        "interval": wilson(statistics.fmean(known), len(known)) if known else None,
        "mean_lengths": [statistics.fmean(each.lengths[0] for each in side) for side in zip(*pairs)],
        "mean_rewards": [statistics.fmean(side) for side in zip(*scored)] or None,
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
