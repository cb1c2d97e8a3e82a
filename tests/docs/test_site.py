"""What the site makes of links to the repository, of pictures, and of options."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.pages.blocks import ROOT

pytest.importorskip("sphinx", reason='the documentation needs pip install -e ".[docs]"')
Build = Callable[..., tuple[str, str]]
EXTENSIONS = [f"tools.documentation.{name}" for name in ("site", "options")]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """`build(text, url="")`: the page's HTML in a site below a repository, and the warnings."""
    from sphinx.application import Sphinx
    from sphinx.util.docutils import docutils_namespace

    from tools.documentation import site

    monkeypatch.setattr(site, "ROOT", tmp_path)
    docs = tmp_path / "docs"
    (docs / "pictures").mkdir(parents=True)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "kto.yaml").write_text("method: kto\n")
    (tmp_path / "README.md").write_text("# A\n")
    for name in ("a-light.svg", "a-dark.svg"):
        (docs / "pictures" / name).write_text("<svg/>")

    def run(text: str, url: str = "") -> tuple[str, str]:
        (docs / "index.md").write_text(f"# Page\n\n{text}\n")
        warnings = io.StringIO()
        settings = {
            "extensions": ["myst_parser", *EXTENSIONS],
            "myst_enable_extensions": ["deflist"],
            "repository_url": url,
            "exclude_patterns": ["pictures"],
            "html_theme": "basic",
        }
        out = docs / "_build"
        with docutils_namespace():
            app = Sphinx(docs, None, out, out / "trees", "html", settings, None, warnings, freshenv=True)
            app.build()
        return (out / "index.html").read_text(), warnings.getvalue()

    return run


def test_without_an_address_a_link_is_the_path(build: Build) -> None:
    html, warnings = build("[the recipe](../launch/kto.yaml), [kto.yaml](../launch/kto.yaml), [all](../launch/)")
    text = " ".join(re.sub(r"<[^>]+>", "", html).split())
    assert "the recipe (launch/kto.yaml), launch/kto.yaml, all (launch)" in text and warnings == ""
    assert "_downloads" not in html


PICTURE = """\
<picture>
  <source media="(prefers-color-scheme: dark)" srcset="pictures/a-dark.svg">
  <img alt="curves" src="pictures/a-light.svg">
</picture>
"""


def test_links_pictures_and_options(build: Build, tmp_path: Path) -> None:
    """Links lead to the repository, pictures are there for light and for dark, and options have their help."""
    links = "[the recipe](../launch/kto.yaml) [readme](../README.md#a)"
    html, warnings = build(f"{links}\n\n{PICTURE}\n```{{options}} kto\n```", "https://host/blob/main/")
    assert re.search(r'href="https://host/blob/main/launch/kto.yaml">(<span[^>]*>)?the recipe<', html)
    assert 'href="https://host/blob/main/README.md#a"' in html and warnings == ""
    for kind in ("light", "dark"):
        assert f'<img alt="curves" src="pictures/a-{kind}.svg" class="only-{kind}">' in html
    assert "<picture" not in html and (tmp_path / "docs" / "_build" / "pictures" / "a-dark.svg").is_file()
    text = " ".join(re.sub(r"<[^>]+>", " ", html).split())
    assert "desirable_weight = 1.0" in text and "learning_rate" not in text


def test_every_method_and_the_shared_options_have_a_list() -> None:
    from alignment.config.registry import METHODS

    page = (ROOT / "docs" / "reference" / "api" / "configs.md").read_text()
    assert set(re.findall(r"^```\{options\} (\w+)$", page, re.MULTILINE)) == {*METHODS, "shared"}
