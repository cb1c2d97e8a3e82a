"""Every code block of README.md and docs/ parses, names options that exist, and can be planned where it cannot run."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from helpers import make_classifier, make_model
from pages.blocks import Block, BlockError, blocks_of, pages
from pages.checks import check, script_of
from pages.commands import commands_of
from pages.dry import StandIns, dry_run, submit
from pages.running import make_folder, write_file
from tiny_adapters import lora, make_adapter

pytestmark = pytest.mark.usefixtures("own_process_group", "library_bars")
_TRAINING = ("train", "precompute", "prepare")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model that pages find in outputs/tiny."""
    return make_model(tmp_path_factory.mktemp("pages") / "tiny")


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> StandIns:
    """What takes the place of models and data that are not here; they say that they support long sequences."""
    folder = tmp_path_factory.mktemp("stand-ins")
    model, classifier = make_model(folder / "model", "untied"), make_classifier(folder / "classifier")
    adapter = make_adapter(folder / "adapter", model, lora())
    for name in (model, classifier):
        config = Path(name) / "config.json"
        config.write_text(config.read_text().replace('embeddings": 96', 'embeddings": 131072'))
    return StandIns(folder, model, classifier, str(adapter))


def faults_of(page: str, folder: Path) -> list[str]:
    """What is wrong with the blocks of a page, as far as it can be seen without running them."""
    faults, blocks = [], blocks_of(page)
    with contextlib.chdir(folder):
        for block in blocks:
            if block.file:
                write_file(block, Path())
            try:
                if block.skipped is None:
                    check(block)
            except BlockError as error:
                faults.append(str(error))
    return faults


@pytest.mark.parametrize("page", pages())
def test_blocks_have_a_language_and_parse(page: str, tiny: str, tmp_path: Path) -> None:
    assert faults_of(page, make_folder(tmp_path / "work", tiny)) == []


def _planned(page: str) -> list[Block]:
    with contextlib.suppress(BlockError):
        return [
            block
            for block in blocks_of(page)
            if (block.needs or block.slow) and block.language in ("bash", "console") and block.skipped is None
        ]
    return []


@pytest.mark.parametrize("page", [page for page in pages() if _planned(page)])
def test_commands_that_cannot_run_here_can_be_planned(
    page: str, tiny: str, stand_ins: StandIns, tmp_path: Path
) -> None:
    folder, faults = make_folder(tmp_path / "work", tiny), []
    for block in blocks_of(page):
        if block.file:
            write_file(block, folder)
        if block not in _planned(page):
            continue
        for command in commands_of(script_of(block)):
            try:
                if "--help" in command.arguments:
                    continue
                if command.name in _TRAINING:
                    dry_run(block, command, stand_ins, folder)
                elif command.name == "submit":
                    submit(block, command, folder)
            except BlockError as error:
                faults.append(str(error))
    assert faults == []
