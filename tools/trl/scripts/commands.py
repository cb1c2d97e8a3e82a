"""Select the scripts of a checkout, and extract the commands from their docstrings."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from tools.trl.checkouts import release

_NAMES = (
    *(f"examples/scripts/{name}.py" for name in ("kto", "cpo", "dpo_online", "online_dpo", "reward_modeling", "sft")),
    *(f"trl/scripts/{name}.py" for name in ("kto", "reward", "sft")),
)
_IMPORT = re.compile(r"^( *)from trl(?:\.[\w.]+)? import", re.M)
# Options for two steps on a CPU. The last value of an option is used.
SHORT = {
    "max_steps": "2",
    "per_device_train_batch_size": "2",
    "per_device_eval_batch_size": "2",
    "gradient_accumulation_steps": "1",
    "logging_steps": "1",
    "output_dir": "out",
}
_ONLINE = {"max_new_tokens": "8"}
_INSTRUCT = "Qwen/Qwen2-0.5B-Instruct"
_REWARD = f"python reward.py --model_name_or_path {_INSTRUCT} --dataset_name trl-lib/ultrafeedback_binarized"
_WITHOUT_DOCSTRING = (_REWARD, f"{_REWARD} --use_peft --lora_task_type SEQ_CLS")
_CONFIG = ("--config", "mixture.yaml")
_MIXTURE = """env: {{SCRIPT_TEST: 1}}
datasets:
  - path: {name}
  - path: {name}
    split: test
test_split_size: 0.1
"""


@dataclass(frozen=True)
class Command:
    """A run of a script.

    Attributes:
        release: TRL release.
        script: path of the script in the checkout.
        label: distinguishes it from the other commands of the script.
        arguments: the arguments.
        changes: differences from the docstring's command, except :data:`SHORT`.
        files: name and text of each file that the command reads.
    """

    release: str
    script: str
    label: str
    arguments: list[str]
    changes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its row."""
        return f"{self.release} {self.script} {self.label}"


def scripts(checkout: Path) -> list[Path]:
    """Return the scripts of a checkout, except those that have only moved."""
    found = [checkout / name for name in _NAMES if (checkout / name).exists()]
    return [path for path in found if ast.parse(path.read_text()).body]


def rewritten(text: str) -> str:
    """Rewrite a script to import from ``alignment`` instead of ``trl``, without changing other lines."""
    return _IMPORT.sub(r"\1from alignment import", text)


def commands(checkout: Path, path: Path) -> list[Command]:
    """Return the commands of a script: those of its docstring, shortened, and additional ones.

    Args:
        checkout: a checkout of TRL.
        path: path of the script in the checkout.
    """
    source = path.read_text()
    joined = (ast.get_docstring(ast.parse(source)) or "").replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines() if line.strip().startswith("python ")]
    where = (release(checkout), str(path.relative_to(checkout)))
    found = [_shortened(where, shlex.split(line)[2:]) for line in lines or _WITHOUT_DOCSTRING]
    return [*found, *_further(found, source)]


def _shortened(where: tuple[str, str], given: list[str]) -> Command:
    """Adapt a command to a short run without network and trackers."""
    given = [part for argument in given for part in argument.split("=", 1)]
    changes: list[str] = []
    if "wandb" in given:
        given[given.index("wandb")] = "none"
        changes.append("`--report_to none`")
    if "--push_to_hub" in given:
        given.remove("--push_to_hub")
        changes.append("no `--push_to_hub`")
    short = SHORT | (_ONLINE if "online" in where[1] else {})
    if "--eval_strategy" in given:
        short["eval_steps"] = "1"
    arguments = [*given, *(part for name, value in short.items() for part in (f"--{name}", value))]
    kind = "QLoRA" if "--load_in_4bit" in given else "LoRA" if "--use_peft" in given else "full"
    return Command(*where, kind, arguments, changes)


def _further(found: list[Command], source: str) -> list[Command]:
    """Return additional commands: 4-bit weights, completions and judges at evaluation, a mixture."""
    full = found[0]
    more: list[Command] = []
    if "gpt2" in full.arguments and "SIMPLE_CHAT_TEMPLATE" not in source:
        changes = [f"`--model_name_or_path {_INSTRUCT}`"]
        named = [_INSTRUCT if part == "gpt2" else part for part in full.arguments]
        more.append(Command(full.release, full.script, "model with a chat template", named, changes))
    if "--packing" in full.arguments:
        more += [_changed(each, f"{each.label}, no packing", without="--packing") for each in found]
    if "get_quantization_config" in source and not any(each.label == "QLoRA" for each in found):
        adapters = next(each for each in found if each.label == "LoRA")
        more.append(_changed(adapters, "QLoRA", "--load_in_4bit", without="--packing"))
    if "LogCompletionsCallback" in source:
        more.append(_changed(full, "completions", "--eval_strategy", "steps", "--eval_steps", "1"))
    if "PairRMJudge" in source:
        judged = _changed(full, "", without="--missing_eos_penalty")
        more.append(_changed(judged, "judge", "--judge", "pair_rm", without="--reward_model_path"))
    if "get_dataset" in source:
        name = full.arguments[full.arguments.index("--dataset_name") + 1]
        arguments = _changed(_changed(full, "", without="--packing"), "", without="--dataset_name").arguments
        text = _MIXTURE.format(name=name)
        changes = ["`--config mixture.yaml`"]
        more.append(Command(full.release, full.script, "mixture", [*arguments, *_CONFIG], changes, {_CONFIG[1]: text}))
    return more


def _changed(command: Command, label: str, *more: str, without: str | None = None) -> Command:
    """Return a command with additional arguments, and without one argument and its value."""
    arguments = list(command.arguments)
    changes = [*command.changes]
    if more:
        changes.append(f"`{' '.join(more)}`")
    if without in arguments:
        assert without is not None
        start = arguments.index(without)
        end = start + 1
        while end < len(arguments) and not arguments[end].startswith("--"):
            end += 1
        del arguments[start:end]
        changes.append(f"no `{without}`")
    return Command(command.release, command.script, label, [*arguments, *more], changes)
