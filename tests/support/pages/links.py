"""Relative links and anchors of Markdown files, as GitHub and the site resolve them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

_EXTERNAL = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)
_HTML = re.compile(r'\b(?:href|src|srcset)="([^"]+)"')
_HTML_ANCHOR = re.compile(r'\b(?:id|name)="([^"]+)"')


def _tokens(text: str) -> list[Token]:
    return MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)


def broken_links(path: Path) -> list[str]:
    """Return ``file:line: target`` for every broken relative link of a Markdown file."""
    found = []
    for line, target in _links(path.read_text(encoding="utf-8")):
        if _EXTERNAL.match(target):
            continue
        name, _, anchor = unquote(target).partition("#")
        goal = (path.parent / name).resolve() if name else path.resolve()
        if not goal.exists():
            found.append(f"{path}:{line}: {target}: no such file")
        elif anchor and goal.suffix == ".md" and anchor not in anchors(goal):
            found.append(f"{path}:{line}: {target}: no such heading")
    return found


def _links(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and target of every link, image and HTML reference."""
    for token in _tokens(text):
        line = (token.map[0] if token.map else 0) + 1
        if token.type == "html_block":
            yield from ((line, target) for target in _HTML.findall(token.content))
        for child in token.children or ():
            target = child.attrGet("href") or child.attrGet("src")
            if target:
                yield line, str(target)
            elif child.type == "html_inline":
                yield from ((line, found) for found in _HTML.findall(child.content))


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a Markdown file: those that GitHub generates for headings, and those in HTML."""
    found: dict[str, int] = {}
    names = set()
    tokens = _tokens(path.read_text(encoding="utf-8"))
    for token, content in zip(tokens, tokens[1:]):
        if token.type == "heading_open":
            slug = slugify("".join(child.content for child in content.children or () if child.type != "image"))
            count = found.get(slug, 0)
            found[slug] = count + 1
            names.add(f"{slug}-{count}" if count else slug)
        elif token.type in ("html_block", "inline"):
            names.update(_HTML_ANCHOR.findall(token.content))
    return frozenset(names)


def slugify(heading: str) -> str:
    """Return the anchor that GitHub generates for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
