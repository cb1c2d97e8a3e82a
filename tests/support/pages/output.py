"""Compare the output of a command with the output on a page.

Volatile parts are masked, and other decimals may differ by 2%. ``...`` and ``…`` match anything; on a line of their
own, they match any number of lines.
"""

from __future__ import annotations

import math
import re

_RELATIVE, _ABSOLUTE = 2e-2, 2e-4
_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
_UNITS = r"(?:h|min|s|ms|µs|d|seconds?|minutes?|hours?|days?)"
# Values that differ between machines or runs, and their replacements.
_MASKS = (
    (r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?)?(?: ?(?:UTC|Z|[+-]\d\d:?\d\d))?", "DATE"),
    (r"\b(?:\d+:)?\d?\d:\d\d\b", "TIME"),
    (rf"\b{_NUMBER} ?(?:tokens|rows|sequences|samples|steps|it|completions|prompts|MB)(?:/s| per second)\b", "RATE"),
    (rf"\b{_NUMBER} ?s/(?:it|step|row)\b", "RATE"),
    (rf"\b{_NUMBER} s per step\b", "RATE"),
    (rf"(?<![\w.])(?:{_NUMBER} ?{_UNITS} )*{_NUMBER} ?{_UNITS}\b", "TIME"),
    (rf"\b{_NUMBER} ?(?:[KMGT]i?B|bytes|B)\b", "MEMORY"),
    (r"\b\d+ ?%", "PERCENT"),
    (r"\b(?:pid|process|job) \d+", "PROCESS"),
    (r"\bhost \S+", "HOST"),
    (r"\bon [\w.-]+(?= \(SLURM|,|$)", "on HOST"),
    (r"(?<![\w.])/(?:[\w.@+-]+/)*[\w.@+-]+", "PATH"),
    (r"\b\d+\.\d+\.\d+(?:[.+-]?\w+)*\b", "VERSION"),
    (r"\b[0-9a-f]{12,64}\b", "DIGEST"),
)  # fmt: skip
_ANY = re.compile(r"\.\.\.|…")
_DECIMAL = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[+-]?\d+)?(?![\w.])|(?<![\w.])-?\d+e-?\d+(?![\w.])")


def difference(expected: str, printed: str) -> str | None:
    """Return None if ``printed`` matches ``expected``, else the first line that is missing.

    Args:
        expected: the page's text, with gaps.
        printed: standard output and error as they were written.
    """
    wanted, given = _lines(expected), _lines(printed)
    if not wanted:
        return None  # a page that shows only the command
    found = _matches(wanted, given)
    if found is None:
        return None
    if found < len(wanted):
        return f"not printed: {wanted[found]!r}"
    return "more was printed than is shown; write ... for what is left out"


def _lines(text: str) -> list[str]:
    """Return the nonempty lines as finally shown by a terminal, without overwritten progress bars."""
    shown = (line.rsplit("\r", 1)[-1].rstrip() for line in text.replace("\r\n", "\n").split("\n"))
    return [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line) for line in shown if line.strip()]


def _matches(wanted: list[str], given: list[str]) -> int | None:
    """Return None if all lines match, else the index of the first expected line that was not reached."""
    reached = {0}  # positions in ``given`` after the expected lines so far
    for number, line in enumerate(wanted):
        if _ANY.fullmatch(line.strip()):
            reached = set(range(min(reached), len(given) + 1))
            continue
        reached = {at + 1 for at in reached if at < len(given) and _same(line, given[at])}
        if not reached:
            return number
    return None if len(given) in reached else len(wanted)


def _same(wanted: str, given: str) -> bool:
    wanted, given = _masked(wanted), _masked(given)
    # Spaces around a gap are column padding; texts before and after the gap must appear in order.
    pieces = [_pattern(piece.strip()) for piece in _ANY.split(wanted)]
    found = re.fullmatch(rf"\s*{'.*?'.join(pieces)}\s*", given)
    if found is None:
        return False
    numbers = zip(_DECIMAL.findall(_ANY.sub(" ", wanted)), found.groups())
    return all(math.isclose(float(a), float(b), rel_tol=_RELATIVE, abs_tol=_ABSOLUTE) for a, b in numbers)


def _pattern(text: str) -> str:
    """Return a pattern with a group for each decimal, whose values are compared."""
    return f"({_DECIMAL.pattern})".join(map(re.escape, _DECIMAL.split(text)))


def _masked(line: str) -> str:
    for pattern, name in _MASKS:
        line = re.sub(pattern, name, line)
    return re.sub(r"[ \t]+", " ", line).strip()
