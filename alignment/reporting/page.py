"""The page of a report: one description of sections, rendered as HTML, which escapes every value, or as Markdown."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from alignment.reporting.charts import COLORS, Chart
from alignment.reporting.formats import duration, markdown_table, shown, size

PAGE = "report.html"
_TONES = {
    "finished": "good", "starting": "info", "running": "info", "preempted": "warn", "stopped": "warn",
    "failed": "bad", "lost": "bad",
}  # fmt: skip


class Table(NamedTuple):
    """A table of texts and :class:`Markup`; ``classes`` are CSS classes of its columns, such as ``number``."""

    label: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    classes: Sequence[str]


class Card(NamedTuple):
    """Tables and samples in a frame, with an optional title, the muted end of it, and an introduction.

    A sample is a prompt, its completions by label, and formatted scores by label.
    """

    tables: Sequence[Table] = ()
    title: str = ""
    muted: str = ""
    lead: str = ""
    samples: Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]] = ()


class Section(NamedTuple):
    """A section with any of: cards, side by side with ``columns``; messages (kind and text); charts."""

    title: str
    lead: str = ""
    cards: Sequence[Card] = ()
    columns: bool = False
    messages: Sequence[tuple[str, str]] = ()
    charts: Sequence[Chart] = ()

    def __bool__(self) -> bool:
        return bool(self.cards or self.messages or self.charts)


class Page(NamedTuple):
    """A page. ``tiles`` are label, value and remark each; ``note`` is a tone, an emphasized word and a text."""

    title: str
    kind: str
    sections: Sequence[Section]
    footer: str
    folder: str = ""
    state: str = ""
    facts: Mapping[str, str] = {}
    tiles: Sequence[tuple[str, str, str]] = ()
    note: tuple[str, str, str] | None = None


def render(page: Page) -> str:
    """Render a page as a single HTML file that loads nothing."""
    return str(_template().render(page=page._replace(sections=list(filter(None, page.sections)))))


def as_markdown(page: Page) -> str:
    """Render the facts, tables and messages of a page, without samples, as Markdown for a terminal as well."""
    parts = [f"# {page.kind}: {page.title}", "\n".join(f"- {name}: {value}" for name, value in page.facts.items())]
    for section in filter(None, page.sections):
        parts += [f"## {section.title}", section.lead, "\n".join(f"- {text}" for _, text in section.messages)]
        for card in (each for each in section.cards if not each.samples):
            parts += [card.title and f"### {card.title} {card.muted}".rstrip(), card.lead]
            for table in card.tables:
                rows = [[escape(cell).striptags() for cell in row] for row in table.rows]
                parts.append(markdown_table(table.heads, rows))
    return "\n\n".join(filter(None, parts)).replace("−", "-") + "\n"


def table_section(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]], classes: Sequence[str], lead: str = ""
) -> Section:
    """A section with a single table; an empty one without rows."""
    return Section(title, lead, [Card([Table(title, heads, rows, classes)])] if rows else [])


def phases_section(phases: Mapping[str, Mapping[str, float]], memory: str, lead: str = "") -> Section:
    """Time and memory of each phase, from totals by name: seconds, tokens, peak_bytes and entries."""
    total = sum(one["seconds"] for one in phases.values()) or 1.0
    most = max((one["peak_bytes"] for one in phases.values()), default=0) or 1
    rows = []
    for name, one in sorted(phases.items(), key=lambda item: -item[1]["seconds"]):
        seconds, tokens, peak = one["seconds"], one["tokens"], one["peak_bytes"]
        share, rate = 100 * seconds / total, f"{tokens / seconds:,.0f}" if tokens and seconds else ""
        memory_bar = bar(100 * peak / most, size(peak), "bar second") if peak else ""
        rows.append([name, bar(share, f"{share:.0f}%"), duration(seconds), f"{one['entries']:,.0f}", rate, memory_bar])
    heads = ("phase", "share of the time", "time", "times", "tokens/s", memory)
    return table_section("Phases", heads, rows, ("", "", "number", "number", "number", ""), lead)


def metrics_section(metrics: Iterable[tuple[str, int | None, Mapping[str, Any]]]) -> Section:
    """The final metrics, from titles, steps and values."""
    cards = []
    for title, step, values in metrics:
        rows = [(breakable(name), text) for name, text in shown(values).items()]
        table = Table(f"{title} metrics", ("metric", "value"), rows, ("mono", "number"))
        cards += [Card([table], title, "" if step is None else f"at step {step}")] if rows else []
    return Section("Final metrics", "", cards, columns=True)


def bar(share: float, text: str, kind: str = "bar") -> Markup:
    """A bar of ``share`` percent, with a text."""
    return Markup('<div class="{}" style="--size: {:.2f}%"><i></i><span>{}</span></div>').format(kind, share, text)


def badge(text: str, tone: str | None = None) -> Markup:
    """A state, or any text with a tone: ``good``, ``warn``, ``bad`` or ``info``."""
    return Markup('<span class="badge {}">{}</span>').format(tone or _TONES.get(text, "plain"), text)


def breakable(name: str) -> Markup:
    """A name in which lines may break after underscores and slashes."""
    return Markup(re.sub(r"([_/])", r"\1<wbr>", str(escape(name))))


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(
        loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(badge=badge, colors=COLORS)
    return environment.get_template("page.html")
