"""The grid of ``test_adapter_grid.py``: its cases, models and initial adapters."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from support.drivers.canned import Kind
from support.helpers import make_classifier, make_model, paired_rows, unpaired_rows
from support.pairwise import Combination, everything, pairwise
from support.split_grid import CHECKPOINTING
from support.split_runs import order, prompt_rows, run

# 11 rows give windows of 4, 4 and 3. New adapters start with B = 0, so A has no gradient in the first step.
ROWS, WINDOW = 11, 4
RATE = {"KTO": 0.4, "CPO": 0.2, "DPO": 0.3, "SFT": 0.4, "OnlineDPO": 0.4, "Reward": 0.2}
FACTORS: dict[str, tuple[Any, ...]] = {
    "method": ("KTO", "CPO", "DPO", "OnlineDPO", "SFT", "Reward"),
    "kind": ("lora", "qlora", "int8", "saved", "tied", "dora"),
    "stage": ("stage0", "stage2", "stage3", "stage3-offload"),
    "ranks": (1, 2),
    "start": ("new", "continued"),
    "checkpointing": tuple(CHECKPOINTING),
}
_TIED = ("lora", "tied")
_SAVED = ("saved", "tied")
_SHAPE = {"lora_r": 4, "lora_alpha": 6, "lora_dropout": 0.0}
BITS = {"qlora": 4, "qdora": 4, "int8": 8}


def sampled() -> list[Combination]:
    """Return a subset in which every pair of values occurs."""
    return pairwise(FACTORS)


def part(method: str, kind: str) -> list[Combination]:
    """Return all cases of one method and one kind of adapters, including DoRA on 4-bit weights.

    Checkpointing alternates. DoRA on 4-bit weights is not supported at stage 3.
    """
    ways = itertools.cycle(CHECKPOINTING)
    cases = everything({**FACTORS, "method": (method,), "kind": (kind,), "checkpointing": ("",)})
    allowed = (case for case in cases if kind != "qdora" or not case["stage"].startswith("stage3"))
    return [{**case, "checkpointing": next(ways)} for case in allowed]


def name_of(case: Combination) -> str:
    """Return a name for tests and folders."""
    return "-".join(map(str, case.values()))


def reference_of(case: Combination) -> Combination:
    """Return the simplest run that must make the same update: one rank, no ZeRO, no checkpointing."""
    return {**case, "stage": "stage0", "ranks": 1, "checkpointing": "unchecked"}


def base_of(case: Combination) -> str:
    """Return the name of a case's base model: an architecture that it names, or one of :func:`make_bases`."""
    if "architecture" in case:
        return str(case["architecture"])
    task = "classifier" if case["method"] == "Reward" else "model"
    return f"{task}-{'tied' if case['kind'] in _TIED else 'untied'}"


def saved_of(case: Combination) -> list[str]:
    """Return the fully trained modules that must be requested explicitly."""
    if case["kind"] not in _SAVED:
        return []
    return ["embed_tokens"] if case["method"] == "Reward" else ["lm_head"]


def make_bases(folder: Path, layers: int) -> dict[str, str]:
    """Create the base models, by name."""
    made = {}
    for kind in ("tied", "untied"):
        made[f"model-{kind}"] = make_model(folder / f"model-{kind}", kind, seed=1, layers=layers)
        made[f"classifier-{kind}"] = make_classifier(folder / f"classifier-{kind}", kind, seed=1, layers=layers)
    return made


def rows_of(method: str) -> list[dict[str, Any]]:
    """Return 11 rows. Each KTO window has both labels; 3 of 4 prompts in the first Online DPO window give a pair."""
    if method == "OnlineDPO":
        return prompt_rows(ROWS, (None, Kind.TIED))
    if method in ("KTO", "SFT"):
        rows = unpaired_rows(ROWS, seed=4)
        for place, row in enumerate(order(ROWS)):
            rows[row]["label"] = place % WINDOW != 1
        return rows
    margins = [{"margin": 0.25 * (n % 4)} if method == "Reward" else {} for n in range(ROWS)]
    return [row | margin for row, margin in zip(paired_rows(ROWS, seed=5), margins)]


def start_of(case: Combination, models: dict[str, str], folder: Path) -> str:
    """Return a folder of initial adapters: random A and B, with settings that differ from the base model's."""
    base, saved = base_of(case), saved_of(case)
    dora = case["kind"] in ("dora", "qdora")
    place = folder / "-".join(["start", base, *saved, *["dora"] * dora])
    if place.exists():
        return str(place)
    classifies = case["method"] == "Reward"
    auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    model = auto.from_pretrained(models[base], dtype=torch.float32)
    torch.manual_seed(7)
    config = LoraConfig(
        r=3,
        lora_alpha=2,
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
        modules_to_save=[*saved, *["score"] * classifies],
        use_dora=dora,
        init_lora_weights=False,
        task_type="SEQ_CLS" if classifies else "CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad and "lora_A" not in name and "lora_B" not in name:
            parameter.data.mul_(1 + 0.2 * torch.randn_like(parameter))
    adapted.save_pretrained(place)
    return str(place)


def adapter_run(case: Combination, models: dict[str, str], folder: Path, starts: Path) -> dict[str, Any]:
    """Return the run of a case for ``drivers/adapter_runs.py``: three windows with plain SGD.

    Args:
        case: a combination of the grid.
        models: paths of base models by name.
        folder: folder in which the run's folder is created.
        starts: folder of initial adapters, which are created if necessary.
    """
    world, method = case["ranks"], case["method"]
    micro = (WINDOW if case["stage"] == "stage3" else WINDOW // 2) // world
    bits = BITS.get(case["kind"])
    options: dict[str, Any] = {} if bits is None else {f"load_in_{bits}bit": True}
    if case["start"] == "continued":
        options["adapter_name_or_path"] = start_of(case, models, starts)
    else:
        options |= {"use_peft": True, **_SHAPE, "use_dora": case["kind"] in ("dora", "qdora")}
        options["lora_modules_to_save"] = saved_of(case) or None
    made = run(
        name_of(case),
        method,
        {**models, "reference": ""},
        case["stage"],
        micro,
        WINDOW // micro // world,
        folder=str(folder),
        model=base_of(case),
        rate=RATE[method],
        save_strategy="no",
        **CHECKPOINTING[case["checkpointing"]],
        **options,
    )
    made["args"].pop("ref_placement", None)  # the initial policy by default
    return made | {"ref_model": None, "train": rows_of(method), "case": case}
