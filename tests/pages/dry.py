"""Dry runs of training commands that need a GPU, the Hub or a cluster, with local models and rows instead."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from alignment.cli import prepare
from alignment.cli import submit as submit_command
from alignment.cli.parsing import read_arguments
from alignment.cli.recipes import read_recipe
from alignment.config.errors import OptionError
from pages.blocks import Block, BlockError
from pages.commands import Command

_ROWS = 64
# Options that name things that the test machine does not have, and their replacements.
_MODELS = ("model_name_or_path", "ref_model_name_or_path")
_CLASSIFIERS = ("reward_model_path",)
_ADAPTERS = ("adapter_name_or_path",)
_DROPPED = (
    *("resume_from_checkpoint", "overwrite_output_dir", "report_to"),
    *("push_to_hub", "hub_model_id", "hub_token", "hub_strategy", "hub_private_repo", "hub_revision"),
    *("hub_always_push", "dataset_config", "judge"),
)
_ROW: Mapping[str, Any] = {"prompt": "Name a color.", "chosen": " Blue.", "rejected": " No."}


class StandIns:
    """Local models and rows.

    Args:
        folder: where they are written.
        model: a folder with a model whose configuration supports long sequences.
        classifier: a folder with a reward model.
        adapter: a folder with a PEFT adapter of ``model``.
    """

    def __init__(self, folder: Path, model: str, classifier: str, adapter: str) -> None:
        self.folder, self.model, self.classifier, self.adapter = folder, model, classifier, adapter

    def rows(self, method: str, column_map: Mapping[str, str]) -> Path:
        """Write a file with rows for a method, in the columns that the command expects, and return its path."""
        row = dict(_ROW)
        if method == "kto":
            row = {"prompt": _ROW["prompt"], "completion": _ROW["chosen"], "label": True}
        elif method == "sft":
            row = {"prompt": _ROW["prompt"], "completion": _ROW["chosen"]}
        elif method == "online_dpo":
            row = {"prompt": _ROW["prompt"]}
        rows = []
        for number in range(_ROWS):
            varied = {**row, "prompt": f"{row['prompt']} {number}"}
            if "label" in row:
                varied["label"] = number % 2 == 0
            rows.append({column_map.get(name, name): value for name, value in varied.items()})
        path = self.folder / f"{method}-{abs(hash(json.dumps(column_map, sort_keys=True)))}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path


def dry_run(block: Block, command: Command, stand_ins: StandIns, folder: Path) -> str:
    """Run a training command up to its plan, for the number of GPUs that its launcher would use; return the output.

    Args:
        block: the block that contains it.
        command: ``train``, ``precompute`` or ``prepare``.
        stand_ins: replacements for models and data that do not exist here.
        folder: the page's working directory.

    Raises:
        BlockError: the command fails.
    """
    arguments, ranks = list(command.arguments), command.ranks
    if command.name == "prepare":
        given, arguments = prepare.ranks_parser("prepare").parse_known_args(arguments)
        ranks = max(ranks, given.ranks)
    with contextlib.chdir(folder):
        options = _options(block, arguments)
        method = options["method"]
        if command.name == "precompute":
            options["precompute_ref_log_probs"] = True
        recipe = stand_ins.folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(_local(options, method, stand_ins)))
        printed, failure = _called(lambda: prepare.main([str(recipe), "--ranks", str(ranks)]))
    if failure:
        raise BlockError(f"{block.name}: {command.name} --dry_run: {failure}")
    return printed


def _options(block: Block, arguments: list[str]) -> dict[str, Any]:
    """Return the recipe and the arguments of a command in one mapping."""
    try:
        recipe, given = read_arguments(arguments)
        options = {**(read_recipe(recipe) if recipe is not None else {}), **given}
    except OptionError as error:
        raise BlockError(f"{block.name}: {error}") from None
    if "method" not in options:
        raise BlockError(f"{block.name}: no recipe and no --method")
    return options


def _local(options: dict[str, Any], method: str, stand_ins: StandIns) -> dict[str, Any]:
    """Return the options with local replacements for everything that does not exist here."""
    local = {name: value for name, value in options.items() if name not in _DROPPED}
    for names, replacement in (
        (_MODELS, stand_ins.model), (_CLASSIFIERS, stand_ins.classifier), (_ADAPTERS, stand_ins.adapter)
    ):  # fmt: skip
        for name in names:
            if name in local and not Path(str(local[name])).is_dir():
                local[name] = replacement
    local.setdefault("model_name_or_path", stand_ins.model)
    columns = local.get("column_map") or {}
    columns = json.loads(columns) if isinstance(columns, str) else columns
    rows = str(stand_ins.rows(method, columns))
    if "dataset_mixture" in local:
        del local["dataset_mixture"]
        local["dataset_name"] = rows
    if not Path(str(local.get("dataset_name", ""))).is_file():
        local["dataset_name"] = rows
    for name in ("dataset_train_split", "dataset_test_split"):
        if name in local:
            local[name] = "train"
    if not Path(str(local.get("output_dir", "/"))).is_relative_to("outputs"):
        local["output_dir"] = str(stand_ins.folder / "out")
    if method == "online_dpo" and not local.keys() & {"reward_model_path", "reward_funcs"}:
        local["reward_model_path"] = stand_ins.classifier
    return local


def submit(block: Block, command: Command, folder: Path) -> None:
    """Have ``submit`` print the script that it would pass to SLURM.

    Raises:
        BlockError: the command fails.
    """
    with contextlib.chdir(folder):
        arguments = ["--print", *(word for word in command.arguments if word != "--print")]
        _, failure = _called(lambda: submit_command.main(arguments))
    if failure:
        raise BlockError(f"{block.name}: submit --print: {failure}")


def _called(function: Any) -> tuple[str, str]:
    """Return what a command prints, and its error if it fails; environment variables are restored afterwards."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with _environment(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            function()
        except SystemExit as leaving:
            code = leaving.code
    return out.getvalue(), (err.getvalue().strip()[-3000:] or f"exit status {code}") if code else ""


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """The environment without the settings of the tests: the run is planned for GPUs."""
    with mock.patch.dict(os.environ):
        os.environ.pop("DS_ACCELERATOR", None)
        yield
