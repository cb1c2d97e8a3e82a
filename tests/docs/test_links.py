"""Relative links and anchors in Markdown files resolve, in the repository and hence on GitHub."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages.blocks import ROOT
from pages.links import anchors, broken_links, slugify

FILES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "ds_configs/*.md", "examples/**/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
    if "_build" not in path.parts
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_and_anchors_resolve(path: Path) -> None:
    faults = broken_links(path)
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("One run, one folder", "one-run-one-folder"),
        ("`status.json`", "statusjson"),
        ("What to do?", "what-to-do"),
        ("Out of memory: 24 GB", "out-of-memory-24-gb"),
        ("beta & gamma", "beta--gamma"),
    ],
)
def test_anchors_are_those_of_github(heading: str, anchor: str) -> None:
    assert slugify(heading.replace("`", "")) == anchor


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[a](missing.md)", "1: missing.md: no such file"),
        ("# A\n\n[a](#b)", "3: #b: no such heading"),
        ("[a](other.md#two)", "1: other.md#two: no such heading"),
        ("text\n\n![p](p.svg)", "3: p.svg: no such file"),
        ('<img src="p.svg">', "1: p.svg: no such file"),
        ("```{note}\n[a](missing.md)\n```", "2: missing.md: no such file"),
        ("| a |\n|---|\n| [a](missing.md) |", "missing.md: no such file"),
    ],
)
def test_a_broken_link_is_found(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    (tmp_path / "other.md").write_text("# One\n\n## One\n")
    (found,) = broken_links(tmp_path / "page.md")
    assert found.endswith(fault)


def test_links_that_resolve(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text('# One\n\n## One\n\n<a id="here"></a>\n')
    assert anchors(tmp_path / "other.md") == {"one", "one-1", "here"}
    text = "# A b\n\n[1](#a-b) [2](other.md#one-1) [3](https://x.y/z) [4](other.md#here) `[5](missing.md)`\n"
    (tmp_path / "page.md").write_text(text + "\n```text\n[6](missing.md)\n```\n")
    assert broken_links(tmp_path / "page.md") == []
