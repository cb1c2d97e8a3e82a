"""A model card in the format of the Hugging Face Hub. All values are untrusted and escaped.

Private values are left out: anything that looks like a secret, and local folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from alignment.config.errors import SECRETS
from alignment.reporting.formats import markdown_table, number

OURS = "deepspeed-alignment"  # the tag of every card
Facts = Sequence[tuple[str, str]]
_LONGEST = 200  # characters of one value
# Markup of Markdown and HTML, without the parentheses of links, whose brackets are escaped. Numeric character
# references are never interpreted, not even in tables and code.
_SPECIAL = re.compile(r"[\\`*\[\]{}<>#|~&$@^]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|(?<=www)\.")
_PATH = re.compile(r"(?<![\w.:/\\])(?:file:/*|~|[A-Za-z]:)?(?:[/\\][^\s/\\'\",;:]+)+[/\\]?")
_WHOLE_PATH = re.compile(r"(file:/|~?[/\\]|[A-Za-z]:[/\\])[^\n]*$")
_SECRET_NAME = re.compile(r"(^|_)(token|secret|password|passwd|api_?key|credentials?|authorization)$", re.IGNORECASE)
_TOKEN_IDS = re.compile(r"^(pad|eos|bos|unk|sep|cls|mask|additional|missing_eos)_", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|AKIA|Bearer )\S{8,}|(?<=://)[^/@\s]+@")


@dataclass(frozen=True)
class ModelCard:
    """The content of a card; what is None or empty is omitted."""

    title: str  #: the model's name
    is_classifier: bool = False  #: whether it is a reward model, which outputs a score
    base_model: str | None = None  #: name of the model that was trained
    base_id: str | None = None  #: its identifier on the Hub
    method: str | None = None  #: name of the method, such as ``dpo``
    method_title: str | None = None  #: its display name
    papers: Sequence[tuple[str, str]] = ()  #: title and URL of each paper to cite
    datasets: Sequence[str] = ()  #: identifiers of datasets on the Hub
    export: Sequence[str] = ()  #: sentences about how the weights were written
    training: Facts = ()  #: facts about the run, such as ``("steps", "100")``
    options: Mapping[str, Any] = field(default_factory=dict)  #: those changed from their defaults
    data: Facts = ()  #: facts about the rows
    results_of: str = ""  #: what the metrics were measured on, such as ``step 100``
    train: Mapping[str, Any] = field(default_factory=dict)  #: metrics
    evaluation: Mapping[str, Any] = field(default_factory=dict)  #: metrics
    versions: Mapping[str, str] = field(default_factory=dict)  #: of libraries, by name
    library: str = "transformers"  #: the library that loads the model, ``transformers`` or ``peft``
    tags: Sequence[str] = ()  #: additional tags
    model_name: str | None = None  #: for the metadata, like the following
    language: str | Sequence[str] | None = None
    license: str | None = None
    task: str | None = None  #: the Hub's pipeline tag; by default chosen by ``is_classifier``

    def text(self) -> str:
        """The card, ending with a line break."""
        papers = "\n".join(f"- method: [{escaped(title)}]({url})" for title, url in self.papers)
        sections = {
            "Training": f"{papers}\n{_facts(self.training)}".strip() + self._options(),
            "Data": _facts(self.data),
            "Results": self._results(),
            "Versions": _facts(self.versions.items()),
        }
        parts = [f"---\n{self._metadata()}---", f"# {escaped(self.title)}", self._what()]
        parts += [f"## {name}\n\n{text.strip()}" for name, text in sections.items() if text]
        return "\n\n".join(parts) + "\n"

    def _metadata(self) -> str:
        tag = re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,40}", self.method or "")
        data = ModelCardData(
            base_model=self.base_id,
            library_name=self.library,
            pipeline_tag=self.task or ("text-classification" if self.is_classifier else "text-generation"),
            datasets=list(self.datasets) or None,
            tags=list(dict.fromkeys([OURS, *([tag[0]] if tag else []), *self.tags])),
            model_name=self.model_name,
            language=self.language if isinstance(self.language, (str, type(None))) else list(self.language),
            license=self.license,
        )
        return f"{data.to_yaml().rstrip()}\n"

    def _what(self) -> str:
        noun = "reward model (a sequence classifier with one score)" if self.is_classifier else "language model"
        base, method = self.base_model, self.method_title or self.method
        start = f" from [{escaped(base)}](https://huggingface.co/{base})" if base and base == self.base_id else ""
        start = start or (f" from {escaped(_last(base))}" + " (a local folder)" * ("/" in base) if base else "")
        how = start + (f" with {escaped(public(method))}" if method else "")
        lines = "".join(f"\n- {escaped(public(line), longest=1000)}" for line in self.export)
        return f"A {noun}{how and f', trained{how}'}.\n{lines}".rstrip()

    def _options(self) -> str:
        shown = {name: value for name, value in self.options.items() if not is_secret(name)}
        rows = [(escaped(name), escaped(public(value))) for name, value in shown.items()]
        about = "\n\nOptions changed from their defaults:\n\n"
        return about + markdown_table(("option", "value"), rows) if rows else ""

    def _results(self) -> str:
        columns = {name: one for name, one in (("training", self.train), ("evaluation", self.evaluation)) if one}
        found = {
            name: [number(values.get(name)) for values in columns.values()]
            for name in {**self.train, **self.evaluation}
        }
        rows = [[escaped(name), *("" if v is None else f"{v:.5g}" for v in each)] for name, each in found.items()]
        of = f"Of {escaped(self.results_of)}, as logged during training.\n\n" if self.results_of else ""
        return of + markdown_table(("metric", *columns), rows) if rows else ""


def escaped(text: object, longest: int = _LONGEST) -> str:
    """Escape ``text`` for Markdown: on one line, shortened, without links, formatting, HTML or table cells."""
    line = " ".join(str(text).split())
    line = line if len(line) <= longest else line[: longest - 1] + "…"
    line = "".join(character for character in line if character.isprintable())
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", line)


def is_secret(name: str) -> bool:
    """Whether an option with this name holds a secret."""
    return name in SECRETS or (bool(_SECRET_NAME.search(name)) and not _TOKEN_IDS.search(name))


def public(value: Any) -> Any:
    """The value without secrets and local folders: only the last component of a path is kept."""
    if isinstance(value, Mapping):
        return {str(key): public(one) for key, one in value.items() if not is_secret(str(key))}
    if isinstance(value, (list, tuple)):
        return [public(one) for one in value]
    if not isinstance(value, str):
        return value
    if _WHOLE_PATH.match(value):
        return _last(value)  # including spaces in it
    return _PATH.sub(lambda found: _last(found[0]), without_secret_values(value))


def without_secret_values(text: str) -> str:
    """``text`` with tokens, keys and passwords in URLs replaced."""
    return _SECRET_VALUE.sub("‹hidden›", text)


def is_local(name: str) -> bool:
    """Whether a model or dataset name is a local path."""
    return bool(_WHOLE_PATH.match(name)) or name.startswith((".", "~"))


def hub_id(name: str | None) -> str | None:
    """``name`` if it is a valid hub identifier with an owner, else None; the Hub is not queried."""
    if name is None or "/" not in name or is_local(name):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _last(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _facts(facts: Iterable[tuple[str, object]]) -> str:
    return "\n".join(f"- {escaped(name)}: {escaped(public(value))}" for name, value in facts)
