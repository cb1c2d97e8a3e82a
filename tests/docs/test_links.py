"""Relative links and anchors in Markdown files resolve, in the repository and hence on GitHub."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pages.blocks import ROOT
from support.pages.links import broken_links

FILES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "ds_configs/*.md", "examples/**/*.md", ".github/**/*.md")
    for path in ROOT.glob(pattern)
    if "_build" not in path.parts
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_and_anchors_resolve(path: Path) -> None:
    assert broken_links(path) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text('[a](missing.md) [b](other.md#two) [c](other.md#one-1)\n\n<img src="p.svg">')
    (tmp_path / "other.md").write_text("# One\n\n## One\n")
    found = [fault.partition("page.md:")[2] for fault in broken_links(tmp_path / "page.md")]
    assert found == ["1: missing.md: no such file", "1: other.md#two: no such heading", "3: p.svg: no such file"]
