"""A model card in the format of the Hugging Face Hub. All values are untrusted and escaped.

Private values are left out: anything that looks like a secret, and local folders.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from alignment.config.errors import SECRETS
from alignment.reporting.report import markdown_table

OURS = "deepspeed-alignment"  # the tag of every card
Facts = Sequence[tuple[str, str]]
_LONGEST = 200  # characters of one value
# Markup of Markdown and HTML. Numeric character references are never interpreted, not even in tables and code.
_SPECIAL = re.compile(r"[\\`*\[\]{}<>()#!|~&$@^]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|(?<=www)\.")
_PATH = re.compile(r"(?<![\w.:/\\])(?:file:/*|~|[A-Za-z]:)?(?:[/\\][^\s/\\'\",;:]+)+[/\\]?")
_WHOLE_PATH = re.compile(r"(file:/|~?[/\\]|[A-Za-z]:[/\\])[^\n]*$")
_SECRET_NAME = re.compile(r"(^|_)(token|secret|password|passwd|api_?key|credentials?|authorization)$", re.IGNORECASE)
_TOKEN_IDS = re.compile(r"^(pad|eos|bos|unk|sep|cls|mask|additional|missing_eos)_", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|AKIA|Bearer )\S{8,}|(?<=://)[^/@\s]+@")


@dataclass(frozen=True)
class ModelCard:
    """The content of a card.

    Attributes:
        title: the model's name.
        is_classifier: whether it is a reward model, which outputs a score.
        base_model: name of the model that was trained; None if unknown.
        base_id: its identifier on the Hub; None if it is not there.
        method: name of the method, such as ``dpo``; None if unknown.
        method_title: the method's display name.
        papers: title and URL of each paper to cite.
        datasets: identifiers of datasets on the Hub.
        export: sentences about how the weights were written.
        training: facts about the run, such as ``("steps", "100")``.
        options: options changed from their defaults.
        data: facts about the rows.
        results_of: what the metrics were measured on, such as ``step 100``.
        train: metrics.
        evaluation: metrics.
        versions: of libraries, by name.
        library: the library that loads the model, ``transformers`` or ``peft``.
        tags: additional tags.
        model_name: for the metadata; None omits it.
        language, license: for the metadata; None omits them.
        task: the Hub's pipeline tag. Defaults to one chosen by ``is_classifier``.
    """

    title: str
    is_classifier: bool = False
    base_model: str | None = None
    base_id: str | None = None
    method: str | None = None
    method_title: str | None = None
    papers: Sequence[tuple[str, str]] = ()
    datasets: Sequence[str] = ()
    export: Sequence[str] = ()
    training: Facts = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    data: Facts = ()
    results_of: str = ""
    train: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    library: str = "transformers"
    tags: Sequence[str] = ()
    model_name: str | None = None
    language: str | Sequence[str] | None = None
    license: str | None = None
    task: str | None = None

    def text(self) -> str:
        """The card, ending with a line break."""
        sections = [
            f"---\n{self._metadata()}\n---",
            f"# {escaped(self.title)}",
            self._what(),
            *self._training(),
            *([f"## Data\n\n{_facts(self.data)}"] if self.data else []),
            *self._results(),
            *([f"## Versions\n\n{_facts(self.versions.items())}"] if self.versions else []),
        ]
        return "\n\n".join(sections) + "\n"

    def _metadata(self) -> str:
        method = [self.method] if self.method and _is_tag(self.method) else []
        data = ModelCardData(
            base_model=self.base_id,
            library_name=self.library,
            pipeline_tag=self.task or ("text-classification" if self.is_classifier else "text-generation"),
            datasets=list(self.datasets) or None,
            tags=list(dict.fromkeys([OURS, *method, *self.tags])),
            model_name=self.model_name,
            language=self.language if isinstance(self.language, (str, type(None))) else list(self.language),
            license=self.license,
        )
        text: str = data.to_yaml()
        return text.rstrip()

    def _what(self) -> str:
        noun = "reward model (a sequence classifier with one score)" if self.is_classifier else "language model"
        start = "" if self.base_model is None else f", trained from {_named(self.base_model, self.base_id)}"
        method = self.method_title or self.method
        how = "" if method is None else f" with {escaped(public(method))}"
        if how and not start:
            how = f", trained{how}"
        lines = "\n".join(f"- {escaped(public(line), longest=1000)}" for line in self.export)
        return f"A {noun}{start}{how}.\n\n{lines}".rstrip()

    def _training(self) -> list[str]:
        papers = "\n".join(f"- method: [{escaped(title)}]({url})" for title, url in self.papers)
        parts = [text for text in ("\n".join(filter(None, (papers, _facts(self.training)))),) if text]
        shown = {name: value for name, value in self.options.items() if not is_secret(name)}
        if shown:
            rows = [(escaped(name), escaped(public(value))) for name, value in shown.items()]
            parts.append(f"Options changed from their defaults:\n\n{markdown_table(('option', 'value'), rows)}")
        return ["\n\n".join(["## Training", *parts])] if parts else []

    def _results(self) -> list[str]:
        both = (("training", self.train), ("evaluation", self.evaluation))
        columns = [(title, values) for title, values in both if values]
        if not columns:
            return []
        names = dict.fromkeys(name for _, values in columns for name in values)
        rows = [[escaped(name), *(_number(values.get(name)) for _, values in columns)] for name in names]
        of = f"Of {escaped(self.results_of)}, as logged during training.\n\n" if self.results_of else ""
        return ["## Results\n\n" + of + markdown_table(("metric", *(title for title, _ in columns)), rows)]


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
    if name is None or name.count("/") != 1 or is_local(name):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _last(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _named(name: str, on_hub: str | None) -> str:
    if on_hub is not None:
        return f"[{escaped(on_hub)}](https://huggingface.co/{on_hub})"
    return f"{escaped(_last(name))} (a local folder)" if is_local(name) or "/" in name else escaped(name)


def _is_tag(text: str) -> bool:
    return re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,40}", text) is not None


def _facts(facts: Iterable[tuple[str, object]]) -> str:
    return "\n".join(f"- {escaped(name)}: {escaped(public(value))}" for name, value in facts)


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return ""
    return f"{value:.5g}"
