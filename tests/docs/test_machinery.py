"""The tests of the documentation find the faults of a page: in markers, commands, options and shown output."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages.blocks import Block, BlockError, blocks_of
from pages.checks import check
from pages.commands import commands_of
from pages.output import difference
from pages.running import BlockFailed, PageRun


def page(text: str, folder: Path) -> list[Block]:
    (folder / "page.md").write_text(text)
    blocks_of.cache_clear()
    return blocks_of("page.md", folder)


def fenced(language: str, text: str, marker: str = "") -> str:
    return f"{marker}\n```{language}\n{text}\n```\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (fenced("", "x"), 2),
        ("text\n\n    x = 1\n", 3),
        (fenced("bash", "x", "<!-- test: gpus -->"), 1),
        (fenced("bash", "x", "<!-- test: skip because -->"), 1),
        (fenced("bash", "x", "<!-- test: slow -->\n"), 1),
        (fenced("json", "{}", "<!-- test: slow -->"), 1),
        (fenced("json", "{}", "<!-- test: file=../a -->"), 1),
        ("```{python}\nx\n```\n", 1),
    ],
)
def test_a_broken_convention_is_reported_with_its_line(text: str, line: int, tmp_path: Path) -> None:
    with pytest.raises(BlockError, match=f"^page.md:{line}: "):
        page(text, tmp_path)


def test_launchers_are_removed_from_commands() -> None:
    script = """\
cat > x <<'EOF'
python launch/train.py no
EOF
FOO=1 deepspeed --num_gpus 2 launch/train.py kto \\
  --a 1  # why
torchrun --nproc_per_node=4 -m alignment train kto > log 2>&1 &
srun bash -c 'exec torchrun --nproc_per_node 8 launch/train.py kto'
for s in 1 2; do deepspeed-alignment status out | tee log; done
sbatch -N 1 launch/slurm/train.sbatch kto --b '2 3'; echo 'deepspeed-alignment'
"""
    assert [(found.name, " ".join(found.arguments), found.ranks) for found in commands_of(script)] == [
        ("train", "kto --a 1", 2), ("train", "kto", 4), ("train", "kto", 8), ("status", "out", 1),
        ("train", "kto --b 2 3", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("language", "text", "fault"),
    [
        ("bash", "python launch/train.py kto --dataset_name x --output_dir y --bta 1", "bta"),
        ("bash", "deepspeed-alignment trian kto", "trian"),
        ("bash", "deepspeed-alignment submit kto --dataset_name x --output_dir y --nodess 4", "nodess"),
        ("bash", "python benchmarks/head.py --tokns 4", "--tokns"),
        ("console", "$ deepspeed-alignment status out --jsn\nshown", "--jsn"),
        ("python", "from alignment import KTOConfg", "KTOConfg"),
        ("python", "from alignment import KTOConfig\nKTOConfig(bta=1)", "bta"),
        ("jsonl", '{"a": 1}\n{"a": }', "page.md:3: "),
        ("yaml", "method: kto\ntraining:\n  bta: 1", "bta"),
    ],
)
def test_an_invalid_block_is_reported(language: str, text: str, fault: str, tmp_path: Path) -> None:
    (block,) = page(fenced(language, text).lstrip(), tmp_path)
    with pytest.raises(BlockError, match="^page.md:") as caught:
        check(block)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("loss … kl 0.25, …", "loss 0.4813 kl 0.251, margins 2", True),
        ("took 3.2 s, 21,790 tokens/s", "took 17 s, 3 tokens/s", True),
        ("done", "10%|#  | 1/2\r20%|##| 2/2\rdone", True),
        ("a", "a\nb", False),
        ("a\n...\ne", "a\nb\nc", False),
        ("loss 0.4812 …", "loss 0.5123 and more", False),
        ("step 12 of 50", "step 13 of 50", False),
    ],
)
def test_shown_output(shown: str, printed: str, same: bool) -> None:
    assert (difference(shown, printed) is None) is same


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def run(text: str, folder: Path, timeout: float = 30) -> None:
    with PageRun(folder, timeout) as terminal:
        for block in page(text, folder.parent):
            terminal.run(block)


def test_blocks_share_the_folder_the_shell_and_the_interpreter(folder: Path) -> None:
    run(
        fenced("jsonl", '{"a": 1}', "<!-- test: file=outputs/rows.jsonl -->")
        + fenced("bash", "export NAME='x y'\nmkdir sub && cd sub")
        + fenced("console", '$ echo "$NAME"; cat ../outputs/rows.jsonl\nx y\n{"a": 1}')
        + fenced("python", "value = 3")
        + fenced("bash", "exit 7", "<!-- test: skip because it fails -->")
        + fenced("python", "assert value == 3 and __name__ == '__main__'\nopen('written', 'w').write('yes')")
        + fenced("console", "$ cat ../written; echo error: no; exit 1\nyeserror: no"),
        folder,
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (fenced("bash", "true\nfalse\ntrue"), "page.md:2: exit status 1"),
        (fenced("console", "$ echo a\nb"), "not printed: 'b'"),
        (fenced("python", "x = 1\nraise KeyError('x')"), "line 4, in <module>"),
        (fenced("bash", "sleep 60"), "did not end within 1 s"),
    ],
)
def test_the_failing_block_is_reported(text: str, fault: str, folder: Path) -> None:
    with pytest.raises(BlockFailed) as caught:
        run(text, folder, timeout=1 if "sleep" in text else 30)
    assert fault in str(caught.value)
