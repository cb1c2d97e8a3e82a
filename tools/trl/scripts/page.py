"""The table of scripts as Markdown."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from importlib.metadata import version

from tools.trl.scripts.runs import RAN, Result

_HEAD = """# TRL's example scripts

`python -m tools.trl.scripts CHECKOUT...` wrote this page on {date}, on a CPU, with
{versions}. It runs the example scripts of TRL's checkouts with nothing
changed but the lines that import from `trl`, which import from `alignment`: {scripts} scripts, {ran} of {all} commands
ran, {refused} were refused with the reason that is quoted. A model without chat template is an error in TRL as well.

*full*, *LoRA* and *QLoRA* are the commands of the script's docstring; what differs in them is named, and all are
shortened: `--max_steps 2`, `--per_device_train_batch_size 2`, `--gradient_accumulation_steps 1`, and for Online DPO
`--max_new_tokens 8`. Other labels are further commands, for what the docstring leaves out. The models are random ones
of the same families with some thousand parameters, and the rows have the columns of the data sets that are named.

"""


def table(results: Iterable[Result]) -> list[str]:
    """A row for each command."""
    lines = ["| release | script | command | result |", "|---|---|---|---|"]
    for result in results:
        command = result.command
        label = command.label if not command.changes else f"{command.label} ({', '.join(command.changes)})"
        text = result.text if result.text == RAN else f"{'refused' if result.refused else 'FAILED'}: {result.text}"
        cells = (command.release, f"`{command.script}`", label, text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def text(results: Sequence[Result], lines: Sequence[str]) -> str:
    """The page."""
    head = _HEAD.format(
        date=datetime.date.today().isoformat(),
        versions=", ".join(f"{name} {version(name)}" for name in ("transformers", "datasets", "peft", "torch")),
        scripts=len({(result.command.release, result.command.script) for result in results}),
        ran=sum(result.text == RAN for result in results),
        all=len(results),
        refused=sum(result.refused for result in results),
    )
    return head + "\n".join(lines) + "\n"
