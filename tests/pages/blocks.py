"""The fenced blocks of a page with their languages and markers, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.colon_fence import colon_fence_plugin

ROOT = Path(__file__).resolve().parent.parent.parent
# Written by `make tables` or by a tool, whose own tests compare them with its output.
GENERATED = ("options.md", "cli.md", "trl-options.md", "trl-scripts.md", "architectures.md")
LANGUAGES = ("bash", "python", "console", "json", "jsonl", "yaml", "toml", "text")
ELSEWHERE = ("gpu", "hub", "cluster")  # what a marked block needs, and the machine of the tests may lack
_RUN = ("bash", "python", "console")
_MARKER = re.compile(r"<!--\s*test\b(?P<colon>:?)\s*(?P<text>.*?)\s*-->", re.DOTALL)
_DIRECTIVE = re.compile(r"\{(?P<name>[\w:-]+)\}")
# Directives whose content is Markdown, and those whose content is not code either.
_NESTED = {"note", "warning", "tip", "important", "caution", "admonition", "dropdown", "details", "glossary"}
_OTHER = {"toctree", "figure", "image", "contents", "raw", "list-table", "math"} | {"include", "eval-rst", "options"}


class BlockError(Exception):
    """A block breaks a convention; the message names the page, the line and the fault."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: path of its page, relative to the repository or the page's root.
        line: number of the line on which the fence opens, from 1.
        language: the first word after the fence.
        text: the content, with a final newline.
        needs: of ``gpu``, ``hub`` and ``cluster``.
        slow: run only under ``-m slow``.
        file: the file that it is written to; None if it is not.
        skipped: why it is not run; None if it is.
    """

    page: str
    line: int
    language: str
    text: str
    needs: tuple[str, ...] = ()
    slow: bool = False
    file: str | None = None
    skipped: str | None = None

    @property
    def name(self) -> str:
        """``docs/guides/kto.md:17``."""
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it is run on this machine."""
        return self.language in _RUN and not self.needs and self.skipped is None and self.file is None


def pages() -> list[str]:
    """README.md and the pages below docs/ that people write, relative to the repository."""
    found = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts]
    generated = {ROOT / "docs" / "reference" / name for name in GENERATED}
    return ["README.md", *(str(path.relative_to(ROOT)) for path in found if path not in generated)]


@cache
def blocks_of(page: str, root: Path = ROOT) -> list[Block]:
    """The blocks of a page from top to bottom.

    Raises:
        BlockError: a block has no language, or a marker that is unknown, incomplete or not followed by a block.
    """
    return list(_blocks(page, (root / page).read_text(encoding="utf-8"), 0))


def _parser() -> MarkdownIt:
    return MarkdownIt("commonmark").enable("table").use(colon_fence_plugin)


def _blocks(page: str, text: str, offset: int) -> Iterator[Block]:
    marker: tuple[str, int] | None = None
    for token in _parser().parse(text):
        if token.type not in ("fence", "code_block", "colon_fence"):
            if marker and token.block and token.nesting >= 0:
                raise _dangling(page, marker[1])
            if token.type == "html_block":
                marker = _marker_in(page, token, offset)
            continue
        yield from _of_token(page, token, offset, marker)
        marker = None
    if marker:
        raise _dangling(page, marker[1])


def _dangling(page: str, line: int) -> BlockError:
    return BlockError(f"{page}:{line}: the marker is not on the line before a code block")


def _marker_in(page: str, token: Token, offset: int) -> tuple[str, int] | None:
    """The marker at the end of an HTML block, and the line on which it ends."""
    assert token.map is not None
    found = list(_MARKER.finditer(token.content))
    if not found:
        return None
    last, line = found[-1], offset + token.map[1]
    if len(found) > 1 or token.content[last.end() :].strip():
        raise _dangling(page, line)
    if not last["colon"]:
        raise BlockError(f"{page}:{line}: write the marker as <!-- test: … -->")
    return last["text"], line


def _of_token(page: str, token: Token, offset: int, marker: tuple[str, int] | None) -> Iterator[Block]:
    assert token.map is not None
    line = offset + token.map[0] + 1
    info = token.info.strip()
    directive = _DIRECTIVE.match(info)
    if directive or token.type == "colon_fence":
        if marker:
            raise _dangling(page, marker[1])
        name = directive["name"] if directive else ""
        if name in _NESTED:
            yield from _blocks(page, token.content, offset + token.map[0] + 1)
        elif name not in _OTHER:
            raise BlockError(f"{page}:{line}: {info or ':::'}: a directive that the tests do not know")
        return
    if marker and marker[1] + 1 != line:
        raise _dangling(page, marker[1])
    language = info.split()[0] if info else ""
    if token.type == "code_block":
        raise BlockError(f"{page}:{line}: an indented code block; use a fence with a language")
    if language not in LANGUAGES:
        fault = f"language {language!r}" if language else "no language"
        raise BlockError(f"{page}:{line}: a code block with {fault}; use one of {', '.join(LANGUAGES)}")
    yield _marked(Block(page, line, language, token.content), marker)


def _marked(block: Block, marker: tuple[str, int] | None) -> Block:
    if marker is None:
        return block
    text, line = marker
    where = f"{block.page}:{line}"
    if text.split()[:1] == ["skip"]:
        reason = re.fullmatch(r"skip because\s+(\S.*)", text, re.DOTALL)
        if reason is None:
            raise BlockError(f"{where}: skip has no reason; write <!-- test: skip because REASON -->")
        return Block(block.page, block.line, block.language, block.text, skipped=" ".join(reason[1].split()))
    needs, slow, file = [], False, None
    for word in text.split():
        if word in ELSEWHERE:
            needs.append(word)
        elif word == "slow":
            slow = True
        elif word.startswith("file=") and len(word) > 5:
            file = word.removeprefix("file=")
        else:
            raise BlockError(f"{where}: unknown marker {word!r}; expected slow, gpu, hub, cluster, file=… or skip")
    if not text or (file and (needs or slow)):
        raise BlockError(f"{where}: {'an empty marker' if not text else 'file= goes with no other marker'}")
    if file and (Path(file).is_absolute() or ".." in Path(file).parts):
        raise BlockError(f"{where}: {file} is outside the working directory")
    if not file and block.language not in _RUN:
        raise BlockError(f"{where}: {text!r} means nothing to a {block.language} block, which is not run")
    return Block(block.page, block.line, block.language, block.text, tuple(needs), slow, file)
