"""Support for ``<picture>`` elements with a light and a dark source, as GitHub renders them.

The site has an image for each, and its theme shows one of them, so that the theme switch affects pictures too.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

_FOLDER = "pictures"
_LOGGER = logging.getLogger(__name__)
_PICTURE = re.compile(r"<picture>.*?</picture>", re.DOTALL)
_SOURCE = re.compile(r"<source\b[^>]*>", re.DOTALL)
_IMAGE = re.compile(r"<img\b[^>]*>", re.DOTALL)
_ADDRESS = re.compile(r'\b(?:src|srcset)="([^"]+)"')


class Pictures(SphinxTransform):
    """Split the ``<picture>`` elements of raw HTML."""

    default_priority = 21

    def apply(self, **kwargs: Any) -> None:
        """Split those of this document, and warn about missing files."""
        folder = Path(self.env.doc2path(self.env.docname)).parent
        for node in list(self.document.findall(nodes.raw)):
            if node.get("format") != "html":
                continue
            for address in _ADDRESS.findall(node.astext()):
                if "://" not in address and not (folder / address).is_file():
                    _LOGGER.warning("no such picture: %s", address, location=node, type="pictures")
            html = _PICTURE.sub(lambda found: _split(found[0]), node.astext())
            node.children = [nodes.Text(html)]
            node.rawsource = html


def _split(picture: str) -> str:
    """Return an image for light and one for dark mode; elements of another form are returned unchanged."""
    image = _IMAGE.search(picture)
    sources = {("dark" if "dark" in source else "light"): source for source in _SOURCE.findall(picture)}
    if image is None or not sources:
        return picture
    parts = []
    for scheme in ("light", "dark"):
        address = _ADDRESS.search(sources.get(scheme, image[0]))
        assert address is not None
        shown = _ADDRESS.sub(f'src="{address[1]}" class="only-{scheme}"', image[0], count=1)
        parts.append(shown)
    return "".join(parts)


def _copy(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures, because Sphinx does not track the files that raw HTML references."""
    source = Path(app.srcdir) / _FOLDER
    if error is None and app.builder.format == "html" and source.is_dir():
        ignored = shutil.ignore_patterns("data", "*.py", "*.md", "*.json*")
        shutil.copytree(source, Path(app.outdir) / _FOLDER, dirs_exist_ok=True, ignore=ignored)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_transform(Pictures)
    app.connect("build-finished", _copy)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
