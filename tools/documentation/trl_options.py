"""The page docs/reference/trl-options.md: options of TRL and transformers, from the tables that the checks use."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from transformers import TrainingArguments

from alignment.cli.help import default_text
from alignment.compat.trl.names import older_names
from alignment.compat.trl.table import REMOVED, TransformersOptions
from alignment.compat.trl.verdicts import Verdict, verdict_of
from alignment.config.fields import option_fields
from alignment.config.registry import METHODS

_HEAD = """\
# Options of TRL and transformers

Change the import: `from alignment import KTOConfig, KTOTrainer`. Options have the same names, defaults and units as in
TRL. The tables below list every option of transformers' `TrainingArguments`, and those of TRL 0.24 to 1.16
that do not simply work as there:

- *supported*: the option works as in TRL.
- *accepted*: the option is accepted and has no effect, for the reason given; `options.json` lists it only if set.
- *must be …*: only these values are accepted. Any other value would change the result; it is rejected with an error
  that names the closest supported alternative.

No option is rejected at TRL's default. All other options of TRL's configurations are supported, with the same name.
For a name that is not known, the error suggests the closest one.

A configuration is checked and resolved when you create it; options that you set on it afterwards are checked when the
trainer is created. The trainer works on a copy, `trainer.args`, and does not change yours. It also accepts plain
`TrainingArguments` and uses all of their values, as TRL does. `HfArgumentParser` can parse the configurations, also
together with TRL's `ScriptArguments` and `ModelConfig`. In that case, the options that these classes declare
(`dataset_name`, `model_name_or_path`, `dtype`, `trust_remote_code`, `lora_r` and others) are parsed into them only;
set them on the configuration from Python, in a recipe or on the command line of this project.

The keys `dtype` (or `torch_dtype`), `attn_implementation`, `trust_remote_code`, `load_in_4bit` and `load_in_8bit` of
`model_init_kwargs` set the options of the same names; a conflict with an option is an error. `dtype: float32` in
`model_init_kwargs` does not change the compute dtype, which `bf16` and `fp16` determine: the weights are stored in
float32 in any case. `device_map` is accepted if it places the model on the device of the process.
"""
_FOOT = "<!-- written by `make tables` from alignment/compat/trl/table.py -->\n"


def trl_options_page() -> str:
    """Return the page as Markdown."""
    shared = {field.name for field in option_fields(TransformersOptions)}
    parts = [
        _HEAD,
        "## Options of `TrainingArguments`\n",
        _table(sorted({*_training_arguments(), *shared})),
        "\n## Options of TRL's configurations\n",
        _table(sorted(_of_trl() - shared), methods=True),
        "\n## Other names\n",
        "These names are aliases that take the same values. Setting both names to different values is an error.\n",
        "| name | alias of |\n|---|---|",
        *_rows_of_names(),
        "\n## Rejected names\n",
        "| name | instead |\n|---|---|",
        *(f"| `{name}` | {instead[0].upper()}{instead[1:]} |" for name, instead in sorted(REMOVED.items())),
        f"\n{_FOOT}",
    ]
    return "\n".join(parts)


def _training_arguments() -> set[str]:
    """Return the options of transformers' ``TrainingArguments`` that are options here."""
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    return names & {field.name for cls in METHODS.values() for field in option_fields(cls)}


def _of_trl() -> set[str]:
    """Return the options that are judged, or of which TRL has another default."""
    judged = {field.name for cls in METHODS.values() for field in option_fields(cls) if verdict_of(field) is not None}
    return judged | ({name for cls in METHODS.values() for name in cls.TRL_DEFAULTS} - _training_arguments())


def _table(names: Iterable[str], methods: bool = False) -> str:
    """Return a table with a row per option, or several rows if methods treat it differently."""
    lines = ["| option | methods | status |", "|---|---|---|"] if methods else ["| option | status |", "|---|---|"]
    for name in names:
        by_text: dict[str, list[str]] = {}
        for method, cls in METHODS.items():
            for field in (each for each in option_fields(cls) if each.name == name):
                by_text.setdefault(_text(verdict_of(field)), []).append(method)
        for text, owners in by_text.items():
            said = text + _other_defaults(name, owners)
            lines.append(f"| `{name}` | {', '.join(owners)} | {said} |" if methods else f"| `{name}` | {said} |")
    return "\n".join(lines)


def _text(verdict: Verdict | None) -> str:
    if verdict is None:
        return "*supported*"
    if verdict.values is None:
        return f"*accepted*: {verdict.reason}"
    return f"*must be* {_values(verdict.values)}: {verdict.reason}"


def _values(values: Collection[Any]) -> str:
    shown = ("unset" if value is None else f"`{str(value).lower()}`" for value in values if value not in ("", [], {}))
    return " or ".join(shown) or "unset"


def _other_defaults(name: str, owners: list[str]) -> str:
    theirs = {method: METHODS[method].TRL_DEFAULTS.get(name) for method in owners}
    other = {method: default for method, default in theirs.items() if default is not None}
    if not other:
        return ""
    fields = {method: {each.name: each for each in option_fields(METHODS[method])}[name] for method in other}
    pairs = {(default, default_text(fields[method])) for method, default in other.items()}
    if len(pairs) == 1 and set(other) == set(METHODS):
        default, ours = pairs.pop()
        return f"; defaults to `{ours}` (`{default}` in TRL)"
    said = (f"`{default_text(fields[name])}` for {name} (`{default}` in TRL)" for name, default in other.items())
    return "; defaults to " + ", ".join(said)


def _rows_of_names() -> Iterator[str]:
    found = {(older, f"`{name}`") for cls in METHODS.values() for older, name in older_names(cls).items()}
    found |= {("gamma_beta_ratio", "`simpo_gamma`, which is this ratio times `beta`")}
    found |= {("use_transformers_paged", "`rollout_backend`: `continuous` if true")}
    yield from (f"| `{older}` | {name} |" for older, name in sorted(found))
