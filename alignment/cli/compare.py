"""The ``compare`` command: how often a model's answers are better than those of other models."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence

from alignment.cli.sample import run_sampling, sampling_parser
from alignment.methods.online_dpo_options import SampleConfig

_ABOUT = """\
Sample one answer per prompt from a model, from others and from the one that its run started from, and count how often
a reward or a judge prefers the first model's. Ties count half. A judge sees each pair in both orders; if its verdicts
differ, it is a tie. The result is written to comparison.json in the first run's folder, and shown in its report."""


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment compare") -> None:
    """Compare, then exit with status 0, 1 after an error, 2 after a usage error, 85 or 130 if it was stopped."""
    run_sampling(_parser(program), argv, "compare")


def _parser(program: str) -> ArgumentParser:
    about_runs = "the model to compare, then others, as for sample"
    parser = sampling_parser(program, _ABOUT, SampleConfig.ACCEPTED, nargs="+", help=about_runs)
    parser.set_defaults(num_generations=["1"])
    return parser
