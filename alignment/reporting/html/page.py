"""The page of a report: one description of sections, rendered as HTML, which escapes every value, or as Markdown."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from alignment.reporting.html.charts import COLORS, Chart
from alignment.reporting.log_reading import is_mean, number
from alignment.reporting.report import duration, gibibytes, markdown_table

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
    """Tables in a frame, with an optional title, the muted end of it, and an introduction."""

    tables: Sequence[Table]
    title: str = ""
    muted: str = ""
    lead: str = ""


class Sample(NamedTuple):
    """A prompt, and completions and scores by label."""

    prompt: str
    texts: Mapping[str, str]
    scores: Mapping[str, float]


class Samples(NamedTuple):
    """Samples that are shown together, of ``total`` ones."""

    title: str
    rows: Sequence[Sample]
    total: int


class Section(NamedTuple):
    """A section with any of: cards, side by side with ``columns``; messages (kind and text); charts; samples."""

    title: str
    lead: str = ""
    cards: Sequence[Card] = ()
    columns: bool = False
    messages: Sequence[tuple[str, str]] = ()
    charts: Sequence[Chart] = ()
    samples: Sequence[Samples] = ()

    def __bool__(self) -> bool:
        return bool(self.cards or self.messages or self.charts or self.samples)


class Page(NamedTuple):
    """A page. ``tiles`` are label, value and remark each; ``note`` is a tone, an emphasized word and a text."""

    title: str
    kind: str
    sections: Sequence[Section]
    footer: str
    folder: str = ""
    state: str = ""
    facts: Sequence[tuple[str, str]] = ()
    tiles: Sequence[tuple[str, str, str]] = ()
    note: tuple[str, str, str] | None = None


def render(page: Page) -> str:
    """Render a page as a single HTML file that loads nothing."""
    sections = [section for section in page.sections if section]
    return str(_template().render(page=page._replace(sections=sections)))


def report_text(title: str, facts: Iterable[tuple[str, str]], sections: Iterable[Section]) -> str:
    """Render the tables and messages of a report as Markdown that is also readable in a terminal."""
    parts = [f"# {title}", "\n".join(f"- {name}: {value}" for name, value in facts)]
    for section in filter(None, sections):
        parts.append(f"## {section.title}")
        parts += ["\n".join(f"- {text}" for _, text in section.messages)] if section.messages else []
        for card in section.cards:
            parts += [f"### {card.title}"] if card.title else []
            for table in card.tables:
                rows = [[Markup(cell).striptags().replace("−", "-") for cell in row] for row in table.rows]
                parts.append(markdown_table(table.heads, rows))
    return "\n\n".join(parts) + "\n"


def phases_section(phases: Mapping[str, Mapping[str, float]], memory: str, lead: str = "") -> Section:
    """Time and memory of each phase, from totals by name: seconds, tokens, peak_bytes and entries."""
    total = sum(one["seconds"] for one in phases.values()) or 1.0
    most = max((one.get("peak_bytes", 0) for one in phases.values()), default=0) or 1
    rows = []
    for name, one in sorted(phases.items(), key=lambda item: -item[1]["seconds"]):
        seconds, tokens, peak = one["seconds"], one.get("tokens", 0), one.get("peak_bytes", 0)
        share, rate = 100 * seconds / total, f"{tokens / seconds:,.0f}" if tokens and seconds else ""
        shown = "<1%" if 0 < share < 0.5 else f"{share:.0f}%"
        size = bar(100 * peak / most, gibibytes(peak), "bar second") if peak else ""
        rows.append([name, bar(share, shown), duration(seconds), f"{one.get('entries', 0):,.0f}", rate, size])
    heads = ("phase", "share of the time", "time", "times", "tokens/s", memory)
    table = Table("Phases", heads, rows, ("", "", "number", "number", "number", ""))
    return Section("Phases", lead, [Card([table])] if rows else [])


def metrics_section(metrics: Iterable[tuple[str, int | None, Mapping[str, Any]]]) -> Section:
    """The final metrics, from titles, steps and values."""
    cards = []
    for title, step, values in metrics:
        rows = list(shown(values).items())
        table = Table(f"{title} metrics", ("metric", "value"), rows, ("mono name", "number"))
        cards += [Card([table], title, "" if step is None else f"at step {step}")] if rows else []
    return Section("Final metrics", "", cards, columns=True)


def shown(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Format metrics, without sums, counts and speeds."""
    known = {name: number(each) for name, each in metrics.items() if is_mean(name)}
    left_out = ("runtime", "_per_second")
    return {name: brief(one, 5) for name, one in known.items() if one is not None and not name.endswith(left_out)}


def brief(value: float, digits: int = 3) -> str:
    """Format a number with a few significant digits."""
    return f"{value:.{digits}g}".replace("-", "−")


def bar(share: float, text: str, kind: str = "bar") -> Markup:
    """A bar of ``share`` percent, with a text."""
    return Markup('<div class="{}" style="--size: {:.2f}%"><i></i><span>{}</span></div>').format(kind, share, text)


def badge(text: str, tone: str | None = None) -> Markup:
    """A state, or any text with a tone: ``good``, ``warn``, ``bad`` or ``info``."""
    return Markup('<span class="badge {}">{}</span>').format(tone or _TONES.get(text, "plain"), text)


def swatch(number: int, text: str) -> Markup:
    """A text with the color of a curve."""
    color = (number - 1) % COLORS + 1
    return Markup('<span class="run color-{}"><span class="swatch"></span><span>{}</span></span>').format(color, text)


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Line breaks are allowed after underscores and slashes.
    breakable = lambda name: Markup(re.sub(r"([_/])", r"\1<wbr>", str(escape(name))))  # noqa: E731
    slug = lambda title: title.lower().replace(" ", "-")  # noqa: E731
    environment.filters.update(breakable=breakable, slug=slug, short=brief)
    environment.globals.update(badge=badge, colors=COLORS)
    return environment.get_template("page.html")
