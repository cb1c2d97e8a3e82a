"""The ``sample`` command: write a model's completions for prompts as rows that methods train on."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from alignment.cli.guarded import guarded
from alignment.cli.output import parse_arguments
from alignment.cli.parsing import without_local_rank
from alignment.config.errors import OptionError, setting
from alignment.config.fields import hints, option_fields
from alignment.config.options_online import SampleConfig, SamplingConfig
from alignment.engines.launch_env import init_distributed
from alignment.engines.start_up import import_libraries, old_objects_spared, uncollected

_ABOUT = """\
Sample completions of a trained model for prompts, score them if a reward function, a reward model or a judge is given,
and write them as rows that methods train on. Can be started with a launcher as `train` is. The rows do not depend on
the number of ranks. An interrupted command continues when it is repeated."""
WHAT = "output folder of a run, a checkpoint, any folder with a model or an adapter, or a Hub name"
_SHORT = {"num_generations": ["-n"], "rows": ["--as"]}


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment sample") -> None:
    """Sample, then exit with status 0, 1 after an error, 2 after a usage error, 85 or 130 if it was stopped."""

    def run(given: Namespace, options: Any) -> None:
        from alignment.checkpoint.trained_model import find_model
        from alignment.engines.collectives import on_first_rank
        from alignment.online.sampling_job import Sampler, write_rows
        from alignment.run.ranks import tell

        out = Path(options.out or folder_of(given.run) / f"{options.rows}.jsonl").expanduser()
        journal = out.with_name(f"{out.name}.samples")
        if out.exists() and not journal.exists():
            raise OptionError(f"{setting('out', str(out))}: exists and was not written by sample; set another file")
        sampler = Sampler(find_model(given.run, "RUN", trust=options.trust_remote_code), options)
        sampler.sample(journal)
        tell(on_first_rank(lambda: write_rows(sampler, journal, out, options)))
        sampler.close()

    run_sampling(_parser(program), argv, SampleConfig, run)


def _parser(program: str) -> ArgumentParser:
    parser = sampling_parser(program, "RUN", _ABOUT, SampleConfig)
    parser.add_argument("run", metavar="RUN", help=WHAT)
    return parser


def sampling_parser(program: str, runs: str, about: str, config: type[SamplingConfig]) -> ArgumentParser:
    """Return a parser of ``--prompts`` and the options of a class; values are texts, which the class converts."""
    usage = f"{program} {runs} --prompts DATA [--OPTION VALUE ...]"
    parser = ArgumentParser(prog=program, usage=usage, description=about, allow_abbrev=False)
    parser.add_argument(
        "--prompts", metavar="DATA", required=True, help="dataset of prompts: file, folder or Hub name"
    )
    fields, types = {field.name: field for field in option_fields(config)}, hints(config)
    for name in config.ACCEPTED:
        field = fields[name]
        several, switch = "list" in str(types[name]), "bool" in str(types[name])
        nargs: dict[str, Any] = {"nargs": "+"} if several else {"nargs": "?", "const": "true"} if switch else {}
        text = field.metadata["help"].replace("`", "").replace("%", "%%")
        shown = "" if field.default in (None, False) else f" [{field.default}]"
        parser.add_argument(f"--{name}", *_SHORT.get(name, ()), metavar="VALUE", help=text + shown, **nargs)
    return parser


def folder_of(run: str) -> Path:
    """Return the folder for the output about a model: its own, or the present one for a Hub name."""
    folder = Path(run).expanduser()
    return folder if folder.is_dir() else Path()


def run_sampling(
    parser: ArgumentParser,
    argv: Sequence[str] | None,
    config: type[SamplingConfig],
    run: Callable[[Namespace, Any], None],
) -> None:
    """Parse the options, join the process group, import the large libraries, call ``run``, and exit.

    These are imported last, so that an invalid option fails immediately.
    """
    given = parse_arguments(parser, without_local_rank(sys.argv[1:] if argv is None else argv))
    names = {field.name for field in option_fields(config)}
    values = {name: value for name, value in vars(given).items() if name in names and value is not None}
    values = {name: one[0] if isinstance(one, list) and len(one) == 1 else one for name, one in values.items()}
    use_cpu = str(values.get("use_cpu", False)).lower() in ("true", "1", "yes", "on")

    def job() -> None:
        with uncollected():
            options = config(dataset_name=given.prompts, save_strategy="no", **values)
            init_distributed(options.use_cpu)
            import_libraries()
        with old_objects_spared():
            run(given, options)

    sys.exit(guarded(job, use_cpu))
