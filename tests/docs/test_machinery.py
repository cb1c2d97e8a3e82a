"""The tests of the documentation find the faults of a page: in markers, commands, options and shown output."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pages.blocks import Block, BlockError, blocks_of
from support.pages.checks import check
from support.pages.output import difference
from support.pages.running import BlockFailed, PageRun


def page(text: str, folder: Path) -> list[Block]:
    (folder / "page.md").write_text(text)
    blocks_of.cache_clear()
    return blocks_of("page.md", folder)


@pytest.mark.parametrize(
    ("language", "text", "fault"),
    [
        ("bash", "FOO=1 deepspeed --num_gpus 2 launch/train.py kto --dataset_name x --output_dir y --bta 1 &", "bta"),
        ("bash", "deepspeed-alignment trian kto", "trian"),
        ("bash", "python benchmarks/head.py --tokns 4", "--tokns"),
        ("console", "$ deepspeed-alignment status out --jsn\nshown", "--jsn"),
        ("python", "from alignment import KTOConfig\nKTOConfig(bta=1)", "bta"),
        ("jsonl", '{"a": 1}\n{"a": }', "page.md:3: "),
        ("yaml", "method: kto\ntraining:\n  bta: 1", "bta"),
        ("pyton", "x = 1", "pyton"),
    ],
)
def test_an_invalid_block_is_reported(language: str, text: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(BlockError, match="^page.md:") as caught:
        check(page(f"```{language}\n{text}\n```\n", tmp_path)[0])
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("took 3.2 s, loss … kl 0.25", "took 17 s, loss 0.4813 kl 0.251", True),
        ("a", "a\nb", False),
        ("loss 0.4812 …", "loss 0.5123 and more", False),
    ],
)
def test_shown_output(shown: str, printed: str, same: bool) -> None:
    assert (difference(shown, printed) is None) is same


def test_blocks_share_a_shell_and_an_interpreter_and_the_failing_one_is_reported(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    blocks = page(
        '<!-- test: file=rows.jsonl -->\n```jsonl\n{"a": 1}\n```\n'
        '```bash\nexport NAME="x y"\nmkdir sub && cd sub\n```\n'
        '```console\n$ echo "$NAME"; cat ../rows.jsonl\nx y\n{"a": 1}\n```\n```python\nvalue = 3\n```\n'
        "```python\nassert value == 3\nraise KeyError('x')\n```\n",
        tmp_path,
    )
    with PageRun(tmp_path / "work", 30) as terminal:
        for block in blocks[:-1]:
            terminal.run(block)
        with pytest.raises(BlockFailed, match="line 19, in <module>"):
            terminal.run(blocks[-1])
