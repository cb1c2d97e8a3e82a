"""Generate all mutants of the package, and a seeded sample stratified by package.

The operators are mutmut's (arithmetic, comparisons, removed or None arguments, assignments of None, constants, string
methods, ternaries …). Unlike mutmut itself, this module also mutates decorated functions, which include properties,
context managers and all code without gradients.
"""

from __future__ import annotations

import difflib
import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_string

# Parts of a file that do not affect behavior, or only text for humans.
_LEFT_OUT = (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom, cst.Assert, cst.TypeAlias)
_TYPES = ("ClassVar", "TypeVar", "TypeAlias", "Protocol", "NamedTuple", "cast")


@dataclass(frozen=True)
class Mutant:
    """A file with one change: the first line that changes, the changed lines, their replacement, and the new text."""

    file: str
    line: int
    old: str
    new: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.old}  ->  {self.new or '(removed)'}"

    @property
    def change(self) -> tuple[str, str, str]:
        """The mutant, independent of its current line number."""
        return self.file, self.old, self.new


class _Walk(cst.CSTVisitor):
    """Collects the places of one file that can be mutated."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, cst.CSTNode, cst.CSTNode]] = []  # line, node, replacement

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _LEFT_OUT) or _is_prose(node) or _is_typing(node):
            return False
        if isinstance(node, cst.If) and isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING":
            return False
        for kind, operator in mutation_operators:
            if isinstance(node, kind):
                lines = self.get_metadata(PositionProvider, node, None)
                # Only one change of a text: the same text in upper case would test the same.
                changes = itertools.islice(operator(node), 1 if operator is operator_string else None)
                self.found += [(lines.start.line, node, change) for change in changes if lines is not None]
        return True


def _is_prose(node: cst.CSTNode) -> bool:
    """Return whether a node is a docstring or a text with spaces, which is for humans."""
    if isinstance(node, cst.Expr):
        return isinstance(node.value, (cst.SimpleString, cst.ConcatenatedString))
    return isinstance(node, cst.SimpleString) and " " in node.value


def _is_typing(node: cst.CSTNode) -> bool:
    """Return whether a node is a call or an alias that only affects type checkers."""
    if isinstance(node, cst.AnnAssign):
        kind = node.annotation.annotation
        return isinstance(kind, cst.Name) and kind.value == "TypeAlias"
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value in _TYPES


class Source:
    """A file and its places that can be mutated. Mutants are created on demand, which takes 20 ms each."""

    def __init__(self, file: str, text: str) -> None:
        wrapper, walk = MetadataWrapper(cst.parse_module(text)), _Walk()
        self.file, self.text = file, text
        self.module, self.places = wrapper.visit(walk), walk.found

    def mutant(self, place: int) -> Mutant | None:
        """Create the mutant of a place; None if it does not compile or equals the original file."""
        line, node, replacement = self.places[place]
        changed = self.module.deep_replace(node, replacement)
        assert isinstance(changed, cst.Module)
        try:
            compile(changed.code, "mutant", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return None
        if changed.code == self.text:
            return None
        return Mutant(self.file, line, *_difference(self.text, changed.code), changed.code)


def _difference(old: str, new: str) -> tuple[str, str]:
    """Return the lines that differ between two texts, stripped and joined."""
    lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm=""))[3:]
    sides = [" ⏎ ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"]
    return sides[0], sides[1]


def sample(files: Sequence[Path], root: Path, count: int, seed: int) -> list[Mutant]:
    """Sample ``count`` mutants in random order, for each package in proportion to its size, but at least five."""
    rng = random.Random(seed)
    by_package: dict[tuple[str, ...], list[tuple[Source, int]]] = defaultdict(list)
    for file in sorted(files):
        source = Source(str(file.relative_to(root)), file.read_text(encoding="utf-8"))
        package = file.relative_to(root).parts[1:-1][:1]
        by_package[package] += [(source, place) for place in range(len(source.places))]
    total = sum(map(len, by_package.values()))
    chosen: dict[tuple[str, str, str], Mutant] = {}
    for places in by_package.values():
        rng.shuffle(places)
        share = max(5, round(count * len(places) / total))
        mutants = filter(None, (source.mutant(place) for source, place in places))
        chosen |= {mutant.change: mutant for mutant in itertools.islice(mutants, share)}
    return rng.sample(list(chosen.values()), len(chosen))
