"""Every code block of README.md and docs/ parses, and names options that exist."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from support.helpers import make_model
from support.pages.blocks import BlockError, blocks_of, pages
from support.pages.checks import check
from support.pages.running import make_folder, write_file

pytestmark = pytest.mark.usefixtures("own_process_group", "library_bars")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model that pages find in outputs/tiny."""
    return make_model(tmp_path_factory.mktemp("pages") / "tiny")


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
