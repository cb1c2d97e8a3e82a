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

_PICTURE = re.compile(r'<picture>.*?srcset="(?P<dark>[^"]+)".*?(?P<image><img\b[^>]*>).*?</picture>', re.DOTALL)
_SOURCE = re.compile(r'\bsrc="([^"]+)"')


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
    app.add_transform(Pictures)
    app.connect("build-finished", _copy)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
