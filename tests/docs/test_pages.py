"""Every code block of README.md and docs/ parses, names options that exist, and does what its page says."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.helpers import make_model
from support.pages.blocks import ROOT, Block, BlockError, blocks_of, pages
from support.pages.checks import check, script_of
from support.pages.commands import commands_of
from support.pages.forked import forked_python, make_commands
from support.pages.metrics import undocumented
from support.pages.running import BlockFailed, PageRun, make_folder, write_file

from tools.ranks import RankServer

_WITHOUT_TORCH = ("status", "report", "submit", "--help", "--version")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model that pages find in outputs/tiny."""
    return make_model(tmp_path_factory.mktemp("pages") / "tiny")


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], dict[str, Any]]]:
    """Arguments of `PageRun`, by whether Python is forked; the first call that forks starts the server."""
    server, folder = RankServer(ROOT), tmp_path_factory.mktemp("commands")

    def arguments(forks: bool) -> dict[str, Any]:
        place, address = folder / ("forked" if forks else "started"), server.address if forks else ""
        if not place.exists():
            make_commands(place, folder / "support", address)
        return {"path": [place], **({"python": forked_python(place, address)} if forks else {})}

    yield arguments
    server.close()


def _blocks(page: str) -> list[Block]:
    try:
        return blocks_of(page)
    except BlockError:
        return []  # the next test reports it


def faults_of(blocks: list[Block]) -> Iterator[str]:
    """Yield what is wrong with blocks in this folder, as far as it can be seen without running them."""
    for block in blocks:
        if block.file:
            write_file(block, Path())
        try:
            if block.skipped is None:
                check(block)
        except BlockError as error:
            yield str(error)


@pytest.mark.usefixtures("own_process_group", "library_bars")
@pytest.mark.parametrize("page", pages())
def test_blocks_have_a_language_and_parse(page: str, tiny: str, tmp_path: Path) -> None:
    with contextlib.chdir(make_folder(tmp_path / "work", tiny)):
        assert list(faults_of(blocks_of(page))) == []


def _is_quick(block: Block) -> bool:
    """Whether it imports none of the libraries that take seconds."""
    if block.language == "python":
        return not re.search(
            r"^\s*(?:import|from) +(?:alignment|torch|transformers|peft|datasets|safetensors)", block.text, re.M
        )
    # Also where a command is in a variable.
    if re.search(
        r"python (?!launch/)|\bmake |pip |(?:launch/|alignment )(?:train|precompute|prepare|plan|export)", block.text
    ):
        return False
    return all(command.name in _WITHOUT_TORCH for command in commands_of(script_of(block)))


def _cases() -> Iterator[object]:
    for page in pages():
        runs = [block for block in _blocks(page) if block.runs]
        quick = [_is_quick(block) for block in runs if not block.slow]
        if quick:
            yield pytest.param(page, False, id=page, marks=[] if all(quick) else [pytest.mark.ci])
        if len(quick) < len(runs) or not all(quick):
            yield pytest.param(page, True, id=f"{page}-slow", marks=[pytest.mark.slow])


@pytest.mark.parametrize(("page", "slow"), _cases())
def test_a_page(page: str, slow: bool, tiny: str, tmp_path: Path, commands: Callable[[bool], dict[str, Any]]) -> None:
    blocks = [block for block in blocks_of(page) if slow or not block.slow]
    runs = [block for block in blocks if block.runs]
    # Python is forked with its libraries imported, except with `-m slow`, and where a signal has to reach the command
    # itself: those pages also show that the commands start as a reader starts them.
    as_it_is = slow or any(re.search(r"\bkill\b", block.text) for block in runs) or all(map(_is_quick, runs))
    how = {} if slow else commands(not as_it_is)
    timeout = 1800 if slow else 300
    with contextlib.closing(PageRun(make_folder(tmp_path / "work", tiny), timeout, **how)) as run:
        for block in blocks:
            run.run(block)
    for log in (tmp_path / "work").rglob("log.jsonl"):
        assert not undocumented(log), f"{log}: not in docs/reference/metrics.md"


PAGE = """
```bash
export NAME="x y"
if [ -z "$NAME" ]; then deepspeed launch/train.py kto --dataset_name x --output_dir y --bta 1; fi
mkdir sub && cd sub
```
<!-- test: file=rows.jsonl -->
```jsonl
{"a": 1}
{"b": }
```
```console
$ echo "$NAME, took 3.2 s"; cat ../rows.jsonl
x y, took 17 s
...
{"b": }
```
```python
from alignment import KTOConfig
KTOConfig(bta=1)
```
```yaml
method: kto
training:
  bta: 1
```
"""


def test_faults_of_a_page_are_found_and_its_blocks_share_a_shell_and_an_interpreter(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    blocks = blocks_of("page.md", tmp_path)
    (tmp_path / "work").mkdir()
    with contextlib.chdir(tmp_path / "work"):
        faults = list(faults_of(blocks))
    assert [fault.split(": ")[0] for fault in faults] == ["page.md:2", "page.md:10", "page.md:18", "page.md:22"]
    assert all("bta" in fault for fault in (faults[0], *faults[2:]))
    with contextlib.closing(PageRun(tmp_path / "work", 30)) as terminal:
        for block in blocks[:3]:
            terminal.run(block)
        with pytest.raises(BlockFailed, match="line 20, in <module>"):
            terminal.run(blocks[3])
