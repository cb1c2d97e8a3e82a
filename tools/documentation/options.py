"""Every option of every method with its default and help, from the methods' options classes.

The tables in docs/reference/options.md, and the directive ``options`` of Sphinx::

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
from tools.documentation.page import table, with_generated


def options_page() -> str:
    """Return the text of docs/reference/options.md."""
    return with_generated("options.md", option_tables())


def option_tables() -> Iterator[str]:
    """Yield the lines of a table for each group of options, shared ones first, and of that of losses."""
    groups: dict[type, list[dataclasses.Field[Any]]] = {}
    for group, fields in (pair for cls in METHODS.values() for pair in grouped_fields(cls)):
        groups.setdefault(group, fields)
    for group, fields in groups.items():
        rows = ((f"`{field.name}`", default_text(field), field.metadata["help"]) for field in fields)
        yield from (f"## {title_of(group)}", "", *table("option | default | description", rows), "")
    yield from ("## Losses", "")
    yield from table("method | `loss_type` | options besides `beta` | paper besides the method's", _losses())


def _losses() -> Iterator[tuple[str, ...]]:
    """Yield the row of each loss: the options that it reads besides ``beta``, and its paper if it has one."""
    for method, cls in METHODS.items():
        for name, loss in getattr(cls, "LOSSES", {}).items():
            read = "; ".join(f"`{option}`, {allowed.phrase}" for option, allowed in loss.reads.items())
            yield method, f"`{name}`", read, "" if loss.paper is None else "[{}]({})".format(*loss.paper)


class Options(SphinxDirective):
    """A definition list of options."""

    required_arguments = 1
    has_content = False

    def run(self) -> list[nodes.Node]:
        """Return the nodes, parsed as Markdown because help texts contain backticks and links."""
        method, lines = self.arguments[0], list[str]()
        for group, fields in grouped_fields(AlignmentConfig if method == "shared" else METHODS[method]):
            if (method == "shared") == issubclass(AlignmentConfig, group):
                lines += [f"**{title_of(group)}**", ""]
                for field in fields:
                    lines += [f"`{field.name}` = `{default_text(field)}`", f": {field.metadata['help']}", ""]
        holder = nodes.container(classes=["options"])
        self.state.nested_parse(StringList(lines, source="options"), self.content_offset, holder)
        return [holder]


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("options", Options)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
