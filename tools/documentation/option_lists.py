"""The directive ``options``: every option of a method with its default and help, from the method's options class.

::

    ```{options} kto
    ```

``{options} shared`` lists the options of all methods; the list of a method contains only its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from alignment.cli.help import default_text, grouped_fields, title_of
from alignment.config.options import AlignmentConfig
from alignment.config.registry import METHODS

SHARED = "shared"


class Options(SphinxDirective):
    """A definition list of options."""

    required_arguments = 1
    has_content = False

    def run(self) -> list[nodes.Node]:
        """Return the nodes, parsed as Markdown because help texts contain backticks and links."""
        lines = list(_lines(self.arguments[0]))
        holder = nodes.container(classes=["options"])
        self.state.nested_parse(StringList(lines, source="options"), self.content_offset, holder)
        return [holder]


def groups_of(method: str) -> Iterator[tuple[str, list[dataclasses.Field[Any]]]]:
    """Yield titles and options: those specific to ``method``, or those shared by all methods."""
    cls = AlignmentConfig if method == SHARED else METHODS[method]
    for group, fields in grouped_fields(cls):
        if (method == SHARED) == issubclass(AlignmentConfig, group):
            yield title_of(group), fields


def _lines(method: str) -> Iterator[str]:
    for title, fields in groups_of(method):
        yield from (f"**{title}**", "")
        for field in fields:
            yield from (f"`{field.name}` = `{default_text(field)}`", f": {field.metadata['help']}", "")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("options", Options)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
