"""Charts as inline SVG: drawn by matplotlib, with colors and fonts taken from the page's style sheet."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from alignment.reporting.html.series import Chart, Series

COLORS = 8  # number of curve colors in the style sheet
_WIDTH, _HEIGHT = 4.7, 2.35  # inches; the page scales it
# Colors that matplotlib writes, and the style sheet's properties in their place.
_SERIES = {number: f"#a0000{number}" for number in range(1, COLORS + 1)}
_TEXT, _GRID, _MARK = "#b00001", "#b00002", "#b00003"
_PROPERTIES = {
    **{color: f"var(--series-{number})" for number, color in _SERIES.items()},
    _TEXT: "var(--muted)",
    _GRID: "var(--grid)",
    _MARK: "var(--mark)",
}
_FEW = 24  # curves with at most this many points have markers
_LEAST_SPAN = 1e-4  # relative to the largest value; a smaller range would be drawn as if rounding were a trend


def draw(chart: Chart, number: int) -> str:
    """Draw a chart as an SVG element.

    Args:
        chart: what to draw.
        number: index of the chart on its page, which makes its SVG identifiers unique.
    """
    # Not pyplot, which keeps global state: open figures and the selected GUI backend.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": f"chart {number}", "font.size": 10}
    with rc_context(settings):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        for series in chart.series:
            color = _SERIES[(series.color - 1) % COLORS + 1]
            few = len(series.points) <= _FEW
            axes.plot(
                *zip(*series.points),
                color=color,
                linewidth=1.6,
                linestyle=(0, (4, 2)) if series.evaluation else "solid",
                marker="o" if few else None,
                markersize=3.2 if len(series.points) > 1 else 5,
                solid_joinstyle="round",
                solid_capstyle="round",
            )
        for step, _ in chart.marks:
            axes.axvline(step, color=_MARK, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=4, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
        axes.tick_params(length=0, colors=_TEXT, pad=5)
        axes.set_xlabel("step", color=_TEXT, labelpad=3)
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(_GRID)
        if limits := _limits(chart.series):
            axes.set_ylim(*limits)
        written = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    return _inline(written.getvalue())


def tick(value: float) -> str:
    """Format a tick label as briefly as possible."""
    if value == 0:
        return "0"
    if abs(value) >= 1e12:
        return f"{value:.2g}".replace("e+", "e")
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    if abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.3g}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−") if exponent else mantissa
    return f"{value:.5g}".replace("-", "−")


def _limits(series: Sequence[Series]) -> tuple[float, float] | None:
    """The limits of the y axis if the values are constant up to rounding; None to fit them to the values."""
    values = [value for one in series for _, value in one.points]
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    return None if high - low > _LEAST_SPAN * size else (low - (size or 1.0), high + (size or 1.0))


def _inline(text: str) -> str:
    """Return only the SVG element, sized and colored by the page."""
    svg = text[text.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)  # page-wide
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    view = re.search(r'viewBox="([^"]+)"', svg)
    assert view is not None
    svg = re.sub(r"<svg[^>]*>", f'<svg viewBox="{view[1]}" aria-hidden="true" focusable="false">', svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"font-family: [^;\"]*;\s*", "", svg)
    for color, prop in _PROPERTIES.items():
        svg = svg.replace(color, prop)
    return re.sub(r"\s*\n\s*", " ", svg).strip()
