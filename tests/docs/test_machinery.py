"""The tests of the documentation find the faults of a page: in markers, commands, options and shown output."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from pages.blocks import Block, BlockError, blocks_of
from pages.checks import check, console, script_of
from pages.commands import commands_of
from pages.output import difference
from pages.running import BlockFailed, PageRun


def page(text: str, folder: Path) -> list[Block]:
    (folder / "page.md").write_text(text)
    blocks_of.cache_clear()
    return blocks_of("page.md", folder)


def fenced(language: str, text: str, marker: str = "") -> str:
    return f"{marker}\n```{language}\n{text}\n```\n"


# Blocks and markers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (fenced("", "x"), "2: a code block with no language"),
        (fenced("sh", "x"), "2: a code block with language 'sh'"),
        ("text\n\n    x = 1\n", "3: an indented code block"),
        (fenced("bash", "x", "<!-- test: gpus -->"), "1: unknown marker 'gpus'"),
        (fenced("bash", "x", "<!-- test: skip -->"), "1: skip has no reason"),
        (fenced("bash", "x", "<!-- test: skip because -->"), "1: skip has no reason"),
        (fenced("bash", "x", "<!-- test: -->"), "1: an empty marker"),
        (fenced("bash", "x", "<!-- test slow -->"), "1: write the marker as"),
        (fenced("bash", "x", "<!-- test: slow -->\n"), "1: the marker is not on the line before a code block"),
        ("<!-- test: slow -->\ntext\n", "1: the marker is not on the line before a code block"),
        ("text\n\n<!-- test: slow -->\n", "3: the marker is not on the line before a code block"),
        ("- a\n  <!-- test: slow -->\n- b\n", "the marker is not on the line before a code block"),
        (fenced("json", "{}", "<!-- test: slow -->"), "1: 'slow' means nothing to a json block"),
        (fenced("json", "{}", "<!-- test: slow file=a -->"), "1: file= goes with no other marker"),
        (fenced("json", "{}", "<!-- test: file=../a -->"), "1: ../a is outside the working directory"),
        ("```{python}\nx\n```\n", "1: {python}: a directive that the tests do not know"),
    ],
)
def test_a_broken_convention_is_reported_with_its_line(text: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(BlockError) as caught:
        page(text, tmp_path)
    assert str(caught.value).startswith("page.md:") and fault in str(caught.value)


def test_blocks_with_their_markers(tmp_path: Path) -> None:
    text = (
        fenced("bash", "a")
        + fenced("python", "b", "<!-- test: slow -->")
        + fenced("bash", "c", "<!-- test: hub gpu -->")
        + fenced("json", "{}", "<!-- test: file=outputs/a.json -->")
        + fenced("bash", "d", "<!-- test: skip because it\nneeds a keyboard -->")
        + "1. item\n\n   ```text\n   e\n   ```\n\n````{note}\nnote\n\n```bash\nf\n```\n````\n"
    )
    found = page(text, tmp_path)
    assert [block.text for block in found] == ["a\n", "b\n", "c\n", "{}\n", "d\n", "e\n", "f\n"]
    assert [block.runs for block in found] == [True, True, False, False, False, False, True]
    assert found[1].slow and found[2].needs == ("hub", "gpu") and found[3].file == "outputs/a.json"
    assert found[4].skipped == "it needs a keyboard"
    lines = text.splitlines()
    assert [lines[block.line - 1].strip()[:3] for block in found] == ["```"] * 7


# Commands -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("python launch/train.py kto --a 1", ("train", "kto --a 1", 1)),
        ("deepspeed --num_gpus 2 launch/train.py kto \\\n  --a 1  # why", ("train", "kto --a 1", 2)),
        ("torchrun --nproc_per_node=4 -m alignment train kto > log 2>&1 &", ("train", "kto", 4)),
        ("FOO=1 deepspeed --module alignment precompute dpo | tee log", ("precompute", "dpo", 1)),
        ("deepspeed-alignment status out; true", ("status", "out", 1)),
        ("srun --ntasks 8 python launch/train.py kto", ("train", "kto", 8)),
        ("sbatch -N 1 launch/slurm/train.sbatch kto --b '2 3'", ("train", "kto --b 2 3", 1)),
        ("srun bash -c 'exec torchrun --nproc_per_node 8 launch/train.py kto'", ("train", "kto", 8)),
        ("for s in 1 2; do python launch/train.py kto; done", ("train", "kto", 1)),
        ("cat > x <<'EOF'\npython launch/train.py no\nEOF\npython launch/train.py kto", ("train", "kto", 1)),
    ],
)
def test_launchers_are_removed_from_commands(script: str, expected: tuple[str, str, int]) -> None:
    (found,) = commands_of(script)
    assert (found.name, " ".join(found.arguments), found.ranks) == expected


@pytest.mark.parametrize(
    "script", ["python -c 'print(1)'", "pip install x", "# python launch/train.py kto", "echo 'deepspeed-alignment'"]
)
def test_other_commands_are_ignored(script: str) -> None:
    assert list(commands_of(script)) == []


# Checks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "text", "fault"),
    [
        ("bash", "python launch/train.py kto --dataset_name x --output_dir y --bta 1", "bta"),
        ("bash", "python launch/train.py ktoo --dataset_name x --output_dir y", "ktoo"),
        ("bash", "deepspeed-alignment trian kto", "'trian': no such command"),
        ("bash", "deepspeed-alignment status out --jsn", "unrecognized arguments: --jsn"),
        ("bash", "deepspeed-alignment submit kto --dataset_name x --output_dir y --nodess 4", "nodess"),
        ("bash", "python benchmarks/hed.py", "benchmarks/hed.py: no such script"),
        ("bash", "python benchmarks/head.py --tokns 4", "benchmarks/head.py has no option --tokns"),
        ("bash", "if true; then", "syntax error"),
        ("bash", "echo 'a", "unexpected EOF while looking for matching"),
        ("console", "output alone", "begins with a line '$ command'"),
        ("console", "$ deepspeed-alignment status out --jsn\nshown", "unrecognized arguments: --jsn"),
        ("python", "from alignment import KTOConfg", "cannot import 'KTOConfg'"),
        ("python", "import alignment.nothing", "No module named 'alignment.nothing'"),
        ("python", "from alignment import KTOConfig\nKTOConfig(bta=1)", "KTOConfig has no option 'bta'"),
        ("python", "x = (", "never closed"),
        ("json", "{'a': 1}", "property name"),
        ("jsonl", '{"a": 1}\n{"a": }', "page.md:3: "),
        ("yaml", "a: [", "expected"),
        ("yaml", "method: kto\ntraining:\n  bta: 1", "kto has no option bta"),
        ("toml", "a = ", "Invalid value"),
    ],
)
def test_an_invalid_block_is_reported(language: str, text: str, fault: str, tmp_path: Path) -> None:
    (block,) = page(fenced(language, text).lstrip(), tmp_path)
    with pytest.raises(BlockError) as caught:
        check(block)
    assert str(caught.value).startswith("page.md:") and fault in str(caught.value)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("bash", "python launch/train.py kto --dataset_name x --output_dir y --beta 0.2 --learning_rate 1e-6"),
        ("bash", "deepspeed-alignment status out --json\nls -la"),
        ("console", "$ deepspeed-alignment --version\ndeepspeed-alignment 0.1.0"),
        ("python", "from alignment import KTOConfig, KTOTrainer\nargs = KTOConfig('out', beta=0.2)"),
        ("yaml", "method: kto\ntraining:\n  beta: 0.1"),
        ("yaml", "a: 1"),
        ("jsonl", '{"a": 1}\n{"b": 2}'),
    ],
)
def test_a_valid_block(language: str, text: str, tmp_path: Path) -> None:
    (block,) = page(fenced(language, text), tmp_path)
    check(block)


# Shown output -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a\nb", "a\nb\n"),
        ("a\n...\nd", "a\nb\nc\nd"),
        ("a\n…", "a\nb\nc"),
        ("loss 0.693 …", "loss 0.6931 and more"),
        ("loss 0.4812", "loss 0.4813"),
        ("loss … kl 0.25, …", "loss 0.4813 kl 0.251, margins 2"),
        ("took 3.2 s, 21,790 tokens/s", "took 17 s, 3 tokens/s"),
        ("44 min 10 s (71%)", "2 h 1 min (5%)"),
        ("wrote /home/me/outputs/kto", "wrote /tmp/x1/outputs/kto"),
        ("started 2026-11-22 14:01:53 UTC", "started 2027-01-02 01:02:03 UTC"),
        ("process 41208 on node7 (SLURM job 88123)", "process 7 on other (SLURM job 1)"),
        ("89.66 GiB", "1.2 MiB"),
        ("a   b", "a b"),
        ("done", "10%|#  | 1/2\r20%|##| 2/2\rdone"),
        ("", "anything"),
    ],
)
def test_output_that_matches(shown: str, printed: str) -> None:
    assert difference(shown, printed) is None


@pytest.mark.parametrize(
    ("shown", "printed", "fault"),
    [
        ("a\nb", "a\nc", "not printed: 'b'"),
        ("a", "a\nb", "more was printed"),
        ("a\nb", "a", "not printed: 'b'"),
        ("a\n...\ne", "a\nb\nc", "not printed: 'e'"),
        ("loss 0.4812", "loss 0.5123", "not printed: 'loss 0.4812'"),
        ("loss 0.4812 …", "loss 0.5123 and more", "not printed"),
        ("… kl 0.1", "loss 0.1 kl 0.3", "not printed"),
        ("3 rows", "4 rows", "not printed"),
        ("step 12 of 50", "step 13 of 50", "not printed"),
        ("rewards/margins 0.2", "kl 0.2", "not printed"),
    ],
)
def test_output_that_differs(shown: str, printed: str, fault: str) -> None:
    said = difference(shown, printed)
    assert said is not None and fault in said


def test_a_console_block_consists_of_commands_and_output(tmp_path: Path) -> None:
    (block,) = page(fenced("console", "$ echo a \\\n>   b\na b\n$ true\n$ echo c\nc"), tmp_path)
    assert console(block) == [("echo a \\\n  b", "a b\n"), ("true", ""), ("echo c", "c\n")]
    assert script_of(block) == "echo a \\\n  b\ntrue\necho c\n"


# Running ------------------------------------------------------------------------------------------------------------


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
        + fenced("bash", "exit 7", "<!-- test: gpu -->")
        + fenced("bash", "exit 7", "<!-- test: skip because it fails -->")
        + fenced("python", "assert value == 3 and __name__ == '__main__'\nopen('written', 'w').write('yes')")
        + fenced("console", "$ cat ../written\nyes"),
        folder,
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (fenced("bash", "true\nfalse\ntrue"), "page.md:2: exit status 1"),
        (fenced("bash", "false | cat"), "page.md:2: exit status 1"),
        (fenced("console", "$ echo a\nb"), "not printed: 'b'\n--- printed ---\na"),
        (fenced("console", "$ false"), "exit status 1"),
        (fenced("python", "x = 1\nraise KeyError('x')"), "page.md:2: Python raised an error"),
        (fenced("python", "import os\nos._exit(3)"), "page.md:2: Python exited with status 3"),
        (fenced("python", "import sys\nsys.exit('no')"), "page.md:2: Python raised an error"),
    ],
)
def test_the_failing_block_is_reported(text: str, fault: str, folder: Path) -> None:
    with pytest.raises(BlockFailed) as caught:
        run(text, folder)
    assert fault in str(caught.value)


def test_tracebacks_contain_line_numbers_of_the_page(folder: Path) -> None:
    with pytest.raises(BlockFailed, match=r"line 5, in <module>"):
        run("# A\n\n```python\nx = 1\nraise KeyError(x)\n```\n", folder)


def test_a_command_may_fail_with_the_error_shown(folder: Path) -> None:
    run(fenced("console", "$ echo error: no; exit 1\nerror: no"), folder)


@pytest.mark.parametrize("language", ["bash", "python"])
def test_a_hanging_block_is_terminated(language: str, folder: Path) -> None:
    text = "sleep 60" if language == "bash" else "import time\ntime.sleep(60)"
    start = time.monotonic()
    with pytest.raises(BlockFailed, match="did not end within 1 s"):
        run(fenced(language, text), folder, timeout=1)
    assert time.monotonic() - start < 20


def test_nothing_is_run_in_the_repository(folder: Path) -> None:
    with contextlib.chdir(folder):
        run(fenced("console", f"$ test $PWD = {folder} && echo here\nhere"), folder)
