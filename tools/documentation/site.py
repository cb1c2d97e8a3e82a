"""What the site does to pages that are written for GitHub, as an extension of Sphinx.

Links to files of the repository, such as ``../../launch/recipes/kto.yaml``, lead to the repository at
``repository_url`` (docs/conf.py); without a URL they are shown as paths. ``tests/docs/test_links.py`` checks that the
files exist. A ``<picture>`` element with a light and a dark source becomes an image for each, of which the theme shows
one, so that the theme switch affects pictures too.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

from tools.ranks.client import ROOT

_PICTURE = re.compile(r'<picture>.*?srcset="(?P<dark>[^"]+)".*?(?P<image><img\b[^>]*>).*?</picture>', re.DOTALL)
_SOURCE = re.compile(r'\bsrc="([^"]+)"')


class RepositoryLinks(SphinxTransform):
    """Replace references that MyST would render as downloads or could not resolve."""

    default_priority = 20

    def apply(self, **kwargs: Any) -> None:
        """Replace them in this document."""
        for node in list(self.document.findall(addnodes.download_reference)):
            self._replace(node)
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node.get("reftype") == "myst" and "/" in node.get("reftarget", ""):
                self._replace(node)

    def _replace(self, node: nodes.Element) -> None:
        target, _, anchor = unquote(node["reftarget"]).partition("#")
        anchor = anchor or node.get("reftargetid") or ""
        source = Path(self.env.doc2path(self.env.docname))
        path = (source.parent / target).resolve()
        if not path.is_relative_to(ROOT) or path.is_relative_to(Path(self.env.srcdir).resolve()):
            return
        if not path.exists():
            path = path.with_name(f"{path.name}.md")  # MyST removes the extension of a possible page
        name = str(path.relative_to(ROOT))
        address = self.config.repository_url.rstrip("/")
        if address:
            uri = f"{address}/{name}{'#' + anchor if anchor else ''}"
            link = nodes.reference("", "", *node.children, refuri=uri, internal=False)
            node.replace_self(link)
        else:
            node.replace_self(_shown(node, name))


def _shown(node: nodes.Element, name: str) -> list[nodes.Node]:
    """Return the text of the link, followed by the path unless the text already contains it."""
    text = node.astext()
    if text.rstrip("/") in (name, Path(name).name):
        return [nodes.literal(text=name)]
    return [nodes.inline("", "", *node.children), nodes.Text(" ("), nodes.literal(text=name), nodes.Text(")")]


class Pictures(SphinxTransform):
    """Split the ``<picture>`` elements of raw HTML."""

    default_priority = 21

    def apply(self, **kwargs: Any) -> None:
        """Split those of this document."""
        for node in self.document.findall(nodes.raw):
            if node.get("format") == "html":
                node.rawsource = _PICTURE.sub(_split, node.astext())
                node.children = [nodes.Text(node.rawsource)]


def _split(picture: re.Match[str]) -> str:
    """Return an image for light and one for dark mode."""
    light = _SOURCE.sub(r'src="\1" class="only-light"', picture["image"], count=1)
    return light + _SOURCE.sub(f'src="{picture["dark"]}" class="only-dark"', picture["image"], count=1)


def _copy(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures, because Sphinx does not track the files that raw HTML references."""
    source = Path(app.srcdir) / "pictures"
    if error is None and app.builder.format == "html" and source.is_dir():
        ignored = shutil.ignore_patterns("data", "*.py", "*.md", "*.json*")
        shutil.copytree(source, Path(app.outdir) / "pictures", dirs_exist_ok=True, ignore=ignored)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_config_value("repository_url", "", "env", [str])
    app.add_transform(RepositoryLinks)
    app.add_transform(Pictures)
    app.connect("build-finished", _copy)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
