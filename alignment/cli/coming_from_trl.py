"""The page on the options of TRL and transformers, printed from what decides about them.

``python -m alignment.cli.coming_from_trl docs/reference/trl-options.md`` writes it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from alignment.cli.help import default_text
from alignment.config.compatibility.names import older_names
from alignment.config.compatibility.theirs import OF_TRL, TRAINING_ARGUMENTS
from alignment.config.compatibility.training_arguments import TransformersOptions
from alignment.config.compatibility.verdicts import Verdict, verdict_of
from alignment.config.fields import option_fields
from alignment.config.refusals import NOT_YET, REMOVED, refused_fields
from alignment.config.registry import METHODS

_HEAD = """\
# Coming from TRL

Change the import: `from alignment import KTOConfig, KTOTrainer`. Names, defaults and units of options are TRL's. Every
option that TRL 0.12 to 1.16 or transformers' `TrainingArguments` has is in one of the tables below:

- *works*: it is an option here;
- *accepted*: nothing depends on it, for the reason that is given; `options.json` has it only where it is set;
- *only …*: these values ask for what is done here; any other one would change the result, and is refused by name with
  the nearest thing that works.

No option is refused at TRL's own default. A name that is in no table is refused with the nearest one that there is.

Options that are set after the configuration was made are checked again when the trainer is made. A trainer also takes
plain `TrainingArguments`: every value of theirs, as TRL does. `HfArgumentParser` parses the configurations, beside
`ScriptArguments` and `ModelConfig` too; names that these have (`dataset_name`, `model_name_or_path`, `dtype`,
`trust_remote_code`, `lora_r` …) are then theirs alone, and a configuration takes them from Python, a recipe or this
project's command line.

In `model_init_kwargs`, `dtype` (or `torch_dtype`), `attn_implementation`, `trust_remote_code`, `load_in_4bit` and
`load_in_8bit` are read into the options of these names, and refused where an option says something else. `float32`
there leaves the compute dtype to `bf16` and `fp16`, for weights are kept in float32 in any case. `device_map` is
accepted where it leaves the model on the process's own device.
"""
_FOOT = "<!-- written by `make tables` from alignment/config/compatibility/ -->\n"


def page() -> str:
    """The whole page."""
    shared = {field.name for field in option_fields(TransformersOptions)}
    parts = [
        _HEAD,
        "## Options of `TrainingArguments`\n",
        _table(sorted({*TRAINING_ARGUMENTS, *shared})),
        "\n## Options of TRL's configurations\n",
        _table(sorted({*OF_TRL, *_judged() - shared}), methods=True),
        "\n## Other names\n",
        "Read as the option here, with the same values; both names with different values are refused.\n",
        "| name | here |\n|---|---|",
        *_rows_of_names(),
        "\n## Names that are refused\n",
        "| name | instead |\n|---|---|",
        *(f"| `{name}` | {_sentence(instead)} |" for name, instead in sorted(REMOVED.items())),
        f"\n{_FOOT}",
    ]
    return "\n".join(parts)


def _judged() -> set[str]:
    return {field.name for cls in METHODS.values() for field in option_fields(cls) if verdict_of(field) is not None}


def _table(names: Iterable[str], methods: bool = False) -> str:
    """A row for each of these options, or more where methods differ in what they do with it."""
    lines = ["| option | methods | here |", "|---|---|---|"] if methods else ["| option | here |", "|---|---|"]
    for name in names:
        for owners, said in _said(name):
            lines.append(f"| `{name}` | {', '.join(owners)} | {said} |" if methods else f"| `{name}` | {said} |")
    return "\n".join(lines)


def _said(name: str) -> Iterator[tuple[list[str], str]]:
    """What becomes of an option, with the methods that this is true of."""
    by_text: dict[str, list[str]] = {}
    for method, cls in METHODS.items():
        field = next((each for each in option_fields(cls) if each.name == name), None)
        if field is not None:
            by_text.setdefault(_text(field), []).append(method)
    for text, owners in by_text.items():
        yield owners, text + _other_defaults(name, owners)


def _text(field: dataclasses.Field[Any]) -> str:
    verdict = verdict_of(field)
    if verdict is not None:
        return _verdict_text(verdict)
    if field.name in refused_fields():
        entry = NOT_YET[field.name]
        return f"*only* {_values(entry.allowed)}: {entry.reason}; {entry.instead}"
    return "*works*"


def _verdict_text(verdict: Verdict) -> str:
    if verdict.values is None:
        return f"*accepted*: {verdict.reason}"
    return f"*only* {_values(verdict.values)}: {verdict.reason}; {verdict.instead}"


def _values(values: Collection[Any]) -> str:
    shown = ("unset" if value is None else f"`{str(value).lower()}`" for value in values if value not in ("", [], {}))
    return ", ".join(shown) or "unset"


def _other_defaults(name: str, owners: list[str]) -> str:
    theirs = {method: METHODS[method].TRL_DEFAULTS.get(name) for method in owners}
    other = {method: default for method, default in theirs.items() if default is not None}
    if not other:
        return ""
    fields = {method: {each.name: each for each in option_fields(METHODS[method])}[name] for method in other}
    pairs = {(default, default_text(fields[method])) for method, default in other.items()}
    if len(pairs) == 1 and set(other) == set(METHODS):
        default, ours = pairs.pop()
        return f"; the default is `{ours}`, in TRL `{default}`"
    said = (f"of {name} is `{default_text(fields[name])}`, in TRL `{default}`" for name, default in other.items())
    return "; the default " + ", ".join(said)


def _rows_of_names() -> Iterator[str]:
    found = {(older, name) for cls in METHODS.values() for older, name in older_names(cls).items()}
    found |= {("gamma_beta_ratio", "simpo_gamma"), ("use_transformers_paged", "rollout_backend")}
    further = {
        "gamma_beta_ratio": ", which is the ratio times `beta`",
        "use_transformers_paged": ": `continuous`, where it is true",
    }
    for older, name in sorted(found):
        yield f"| `{older}` | `{name}`{further.get(older, '')} |"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def main() -> None:
    """Write the page into the files that are named."""
    for name in sys.argv[1:]:
        Path(name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
