"""The colors of a report, light and dark; text has a contrast of at least 4.5 on every surface that it is on."""

from __future__ import annotations

_LIGHT = {
    "canvas": "#f6f7f9", "surface": "#ffffff", "raised": "#f3f4f7", "border": "#e2e5ea", "grid": "#e8eaee",
    "text": "#1b1f27", "muted": "#5a6372", "accent": "#2f5bd0", "mark": "#8a93a3",
    "good": "#13693d", "good-soft": "#e2f4e9", "warn": "#7d4a00", "warn-soft": "#fdf0d7",
    "bad": "#a8201f", "bad-soft": "#fde8e7", "info": "#1f4fb8", "info-soft": "#e6edfc",
    "series-1": "#2f6de0", "series-2": "#d4541b", "series-3": "#188754", "series-4": "#8a47c9",
    "series-5": "#b8860b", "series-6": "#c42f6e", "series-7": "#0e8aa0", "series-8": "#6b7280",
}  # fmt: skip
_DARK = {
    "canvas": "#0e1116", "surface": "#161a21", "raised": "#1d222b", "border": "#2b313c", "grid": "#272d37",
    "text": "#e7eaf0", "muted": "#9aa4b4", "accent": "#86a8ff", "mark": "#77818f",
    "good": "#6fd79a", "good-soft": "#12301f", "warn": "#f0b85e", "warn-soft": "#352507",
    "bad": "#ff918c", "bad-soft": "#3d1716", "info": "#93b4ff", "info-soft": "#172647",
    "series-1": "#6f9dff", "series-2": "#ff8f5a", "series-3": "#4fc78a", "series-4": "#c08bf5",
    "series-5": "#e0b33c", "series-6": "#f478ab", "series-7": "#4cc3d9", "series-8": "#a3adbb",
}  # fmt: skip


def declarations() -> dict[str, str]:
    """The custom properties of both themes, as CSS declarations by ``light`` and ``dark``."""
    themes = (("light", _LIGHT), ("dark", _DARK))
    return {name: "".join(f"--{key}:{value};" for key, value in colors.items()) for name, colors in themes}
