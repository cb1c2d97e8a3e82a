"""The ``compare`` command: how often a model's answers are better than those of other models."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

from alignment.cli.sample import WHAT, folder_of, run_sampling, sampling_parser
from alignment.config.errors import OptionError
from alignment.config.options_online import CompareConfig

_ABOUT = """\
Compare the answers of a model with those of other models and of the model that its run started from: sample one answer
per prompt from each, and count how often a reward or a judge prefers the first model's. Ties count half. A judge sees
each pair in both orders; if its verdicts differ, it is a tie. The 95% interval is Wilson's score interval, which is
conservative if there are ties. The result is also written to comparison.json in the folder of the first run, and shown
in its report."""
_MOST_EXAMPLES = 10
_LONGEST = 2000  # characters of an example's texts that are compared for similarity


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment compare") -> None:
    """Compare, then exit with status 0, 1 after an error, 2 after a usage error, 85 or 130 if it was stopped."""

    def run(given: Namespace, options: CompareConfig) -> None:
        with contextlib.redirect_stdout(sys.stderr) if given.json else contextlib.nullcontext():
            result = _compared(given, options)
        from alignment.run.ranks import tell

        tell(json.dumps(result, ensure_ascii=False) if given.json else as_table(result))

    run_sampling(_parser(program), argv, CompareConfig, run)


def _parser(program: str) -> ArgumentParser:
    parser = sampling_parser(program, "RUN [RUN ...]", _ABOUT, CompareConfig)
    parser.add_argument("runs", metavar="RUN", nargs="+", help=f"the model to compare, then others; each an {WHAT}")
    parser.add_argument("--folder", metavar="FOLDER", help="folder for comparison.json [that of the first RUN]")
    parser.add_argument("--json", action="store_true", help="print the result as a JSON object")
    return parser


def _compared(given: Namespace, options: CompareConfig) -> dict[str, Any]:
    """Sample answers of every model, compare them, write the result on the first rank, and return it. Collective."""
    from alignment.checkpoint.trained_model import find_model
    from alignment.engines.collectives import on_first_rank
    from alignment.online.sampling_job import Sampler
    from alignment.reporting.run_content import COMPARISON
    from alignment.run.durable import write_json

    models = [find_model(run, "RUN", trust=options.trust_remote_code) for run in given.runs]
    names, start = list(given.runs), models[0].start()
    if start is not None and start.found not in [model.found for model in models]:
        models, names = [*models, start], [*names, f"{start.found} (start)"]
    if len(models) < 2:
        raise OptionError(f"RUN: what {names[0]} started from is unknown; pass the models to compare it with")
    folder = Path(given.folder or folder_of(given.runs[0])).expanduser()
    journals = [folder / f"comparison-{number}.samples" for number in range(len(models))]
    samplers, answers = [], []
    for model, journal in zip(models, journals):
        samplers.append(Sampler(model, options))
        samplers[-1].sample(journal)
        answers.append(samplers[-1].answers(journal))
        samplers[-1].close()
    rows = sorted(set.intersection(*map(set, answers)))  # a prompt may be too long for another model's tokenizer
    comparisons = []
    for name, theirs in zip(names[1:], answers[1:]):
        pairs = [(answers[0][row], theirs[row]) for row in rows]
        points = samplers[0].points([one for one, _ in pairs], [other for _, other in pairs])
        prompts = [samplers[0].prompt(one) for one, _ in pairs]
        comparisons.append({"with": name, **statistics_of(prompts, pairs, points)})
    result = {"run": names[0], "prompts": given.prompts, "comparisons": comparisons}

    def write() -> None:
        write_json(folder / COMPARISON, result)
        for journal in journals:
            journal.unlink()

    on_first_rank(write)
    return result


def statistics_of(prompts: Sequence[str], pairs: Sequence[tuple[Any, Any]], points: Sequence[Any]) -> dict[str, Any]:
    """Return counts, win rate, means and examples of the answers of two models (``Sampled``) to these prompts."""
    known = [point for point in points if point is not None]
    scores = [
        [one.scores[0] for one in pair if one.scores is not None and one.scores[0] is not None] for pair in pairs
    ]
    scored = [each for each in scores if len(each) == 2]
    examples = [
        {
            "prompt": prompt,
            "answers": [one.texts[0] for one in pair],
            "scores": score if len(score) == 2 else None,
            "points": point,
        }
        for prompt, pair, score, point in zip(prompts, pairs, scores, points)
        if pair[0].texts != pair[1].texts
    ]
    return {
        "prompts": len(points),
        "wins": sum(point > 0.5 for point in known),
        "ties": known.count(0.5),
        "losses": sum(point < 0.5 for point in known),
        "undecided": points.count(None),
        "win_rate": fmean(known) if known else None,
        "interval": wilson(fmean(known), len(known)) if known else None,
        "mean_lengths": [fmean(one.lengths[0] for one in side) for side in zip(*pairs)],
        "mean_rewards": [fmean(side) for side in zip(*scored)] or None,
        "examples": sorted(examples, key=_difference, reverse=True)[:_MOST_EXAMPLES],
    }


def wilson(rate: float, count: int) -> tuple[float, float]:
    """Return the 95% score interval of a share of ``count`` items (Wilson 1927, JASA 22, 209-212)."""
    z = NormalDist().inv_cdf(0.975)
    middle, scale = rate + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def _difference(example: dict[str, Any]) -> float:
    """How different two answers are: by their scores, or else by their texts."""
    if example["scores"] is not None:
        return float(abs(example["scores"][0] - example["scores"][1]))
    return 1 - difflib.SequenceMatcher(None, *(text[:_LONGEST] for text in example["answers"])).ratio()


def as_table(result: dict[str, Any]) -> str:
    """Return the comparisons as text."""
    from alignment.reporting.page import Page, as_markdown
    from alignment.reporting.run_content import COMPARISON, comparison_section

    section = comparison_section(result)
    text = as_markdown(Page(result["run"], "Comparison", [section._replace(cards=section.cards[:1])], ""))
    return f"{text}\nThe answers that differ most are in {COMPARISON} and in the report of the run"
