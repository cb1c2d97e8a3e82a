"""Pictures for light and dark in one ``<picture>`` element, which GitHub shows by the reader's setting.

In the site they become two images, of which the theme shows one: its switch then works for pictures too.
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
    """Splits the ``<picture>`` elements of raw HTML."""

    default_priority = 21

    def apply(self, **kwargs: Any) -> None:
        """Split those of this document, and warn of files that do not exist."""
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
    """An image for light and one for dark; the element as it is if it is made of something else."""
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
    """Raw HTML names pictures that Sphinx does not know of."""
    source = Path(app.srcdir) / _FOLDER
    if error is None and app.builder.format == "html" and source.is_dir():
        ignored = shutil.ignore_patterns("data", "*.py", "*.md", "*.json*")
        shutil.copytree(source, Path(app.outdir) / _FOLDER, dirs_exist_ok=True, ignore=ignored)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_transform(Pictures)
    app.connect("build-finished", _copy)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
