"""``python -m tools.trl.scripts CHECKOUT...``: run TRL's example scripts of these checkouts with this package.

Only the import lines of a script are changed. The commands are those of its docstring, for two steps, with small
random models of the same families and rows with the same columns as its dataset, in one process each and without a
network. Print a Markdown table, and exit with status 1 if a script failed with anything but a refusal.
"""

from __future__ import annotations

import ast
import datetime
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.documentation.page import REFERENCE, table, with_generated
from tools.trial import workspace
from tools.trl.__main__ import command_line, release
from tools.trl.hub.build import environment, prepare

_NAMES = (
    *(f"examples/scripts/{name}.py" for name in ("kto", "cpo", "online_dpo", "reward_modeling", "sft")),
    *(f"trl/scripts/{name}.py" for name in ("kto", "reward", "sft")),
)
_IMPORT = re.compile(r"^( *)from trl(?:\.[\w.]+)? import", re.M)
_SHORT = (
    "--max_steps 2 --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --gradient_accumulation_steps 1 "
    "--logging_steps 1 --output_dir out"
).split()
_INSTRUCT = "Qwen/Qwen2-0.5B-Instruct"
_REWARD = f"python reward.py --model_name_or_path {_INSTRUCT} --dataset_name trl-lib/ultrafeedback_binarized"
_WITHOUT_DOCSTRING = (_REWARD, f"{_REWARD} --use_peft --lora_task_type SEQ_CLS")
_MIXTURE = (
    "{{env: {{A: 1}}, datasets: [{{path: {name}}}, {{path: {name}, split: test}}], test_split_size: 0.1}}"  # YAML
)
_LIMIT = 300  # seconds
RAN = "ran"
PAGE = "trl-scripts.md"


@dataclass(frozen=True)
class Command:
    """A run of the script ``path`` with ``arguments``; ``label`` says what differs from the docstring's command."""

    checkout: Path
    path: Path
    label: str
    arguments: tuple[str, ...]

    def having(self, label: str, *more: str) -> Command:
        """Return the command with another label and further arguments."""
        return replace(self, label=label, arguments=(*self.arguments, *more))

    def without(self, *options: str) -> Command:
        """Return the command without these options and their values."""
        text = "\0".join(self.arguments)
        for option in options:
            text = re.sub(rf"\0?{option}(\0(?!--)[^\0]*)*", "", text)
        label = self.label + "".join(f", no `{option}`" for option in options if option in self.arguments)
        return replace(self, arguments=tuple(filter(None, text.split("\0"))), label=label)


def commands(checkout: Path) -> Iterator[Command]:
    """Yield the commands of the scripts of a checkout: those of their docstrings, shortened, and further ones."""
    for path in (checkout / name for name in _NAMES if (checkout / name).exists()):
        source = path.read_text()
        if not (tree := ast.parse(source)).body:  # it has moved
            continue
        joined = (ast.get_docstring(tree) or "").replace("\\\n", " ")
        lines = [line.strip() for line in joined.splitlines() if line.strip().startswith("python ")]
        found = [_shortened(checkout, path, shlex.split(line)[2:]) for line in lines or _WITHOUT_DOCSTRING]
        yield from found
        full = found[0]
        if "get_quantization_config" in source and not any("--load_in_4bit" in each.arguments for each in found):
            lora = next(each for each in found if "--use_peft" in each.arguments)
            yield lora.without("--packing").having("QLoRA", "--load_in_4bit")
        if "--packing" in full.arguments:
            yield full.without("--packing")
        if "LogCompletionsCallback" in source:
            yield full.having("completions", "--eval_strategy", "steps", "--eval_steps", "1")
        if "gpt2" in full.arguments:
            yield full.having("model with a chat template", "--model_name_or_path", _INSTRUCT)
        if "get_dataset" in source:
            name = full.arguments[full.arguments.index("--dataset_name") + 1]
            yield full.without("--packing", "--dataset_name").having("mixture", "--config", _MIXTURE.format(name=name))


def _shortened(checkout: Path, path: Path, given: Sequence[str]) -> Command:
    parts = [part for argument in given for part in argument.split("=", 1)]
    kind = "QLoRA" if "--load_in_4bit" in parts else "LoRA" if "--use_peft" in parts else "full"
    short = [*_SHORT, *(["--max_new_tokens", "8"] if "online" in path.name else [])]
    command = Command(checkout, path, kind, tuple(parts)).without("--push_to_hub", "--report_to")
    return command.having(command.label, *short)


def run(command: Command, folder: Path, hub: Path) -> str:
    """Run a command in a new folder; return ``ran``, ``refused: …``, or ``FAILED: …`` with the error in one line."""
    folder.mkdir()
    script = folder / command.path.name
    script.write_text(_IMPORT.sub(r"\1from alignment import", command.path.read_text()))
    arguments = list(command.arguments)
    if "--config" in arguments:
        (folder / "mixture.yaml").write_text(arguments[-1])
        arguments[-1] = "mixture.yaml"
    try:
        settings: Any = {"cwd": folder, "env": environment(hub), "capture_output": True, "text": True}
        done = subprocess.run([sys.executable, str(script), *arguments], timeout=_LIMIT, check=False, **settings)
    except subprocess.TimeoutExpired:
        return f"FAILED: timed out after {_LIMIT} s"
    if done.returncode == 0:
        return RAN if (folder / "out").is_dir() else "FAILED: no model was saved"
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    kind, _, text = last.partition(": ")
    return f"refused: {text}" if kind.startswith("alignment.config.errors.") else f"FAILED: {last}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the commands and return the exit status."""
    parser = command_line("tools.trl.scripts", __doc__)
    parser.add_argument("--page", action="store_true", help="write the table to docs/reference/trl-scripts.md")
    given = parser.parse_args(argv)
    hub, chosen = prepare(given.hub), [command for checkout in given.checkouts for command in commands(checkout)]
    with workspace("trl-scripts-") as folder, ThreadPoolExecutor(given.jobs) as pool:
        folders = (folder / str(number) for number in range(len(chosen)))
        results = list(pool.map(run, chosen, folders, [hub] * len(chosen)))
    ran, refused = results.count(RAN), sum(text.startswith("refused") for text in results)
    versions = ", ".join(f"{name} {version(name)}" for name in ("transformers", "datasets", "peft", "torch", "trl"))
    rows = [
        (release(each.checkout), f"`{each.path.relative_to(each.checkout)}`", each.label, text.replace("|", "\\|"))
        for each, text in zip(chosen, results)
    ]
    lines = [
        f"On {datetime.date.today()}, on a CPU, with {versions}: {ran} of {len(results)} commands ran,",
        f"{refused} were refused for the quoted reason.\n",
        *table("release | script | command | result", rows),
    ]
    print("\n".join(lines))
    if given.page:
        (REFERENCE / PAGE).write_text(with_generated(PAGE, lines), encoding="utf-8")
    return int(ran + refused < len(results))


if __name__ == "__main__":
    sys.exit(main())
