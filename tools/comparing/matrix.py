"""Short seeded runs that together cover every method, every ZeRO stage, and one and two ranks.

Models, rows, reward functions and judges are created once for both sides. The runs are recipes for
``launch/train.py``, the interface that a refactoring must preserve.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.chaos.world import REWARDS, test_helpers, write_rows

_JUDGE = '''
import random


def tossed(prompts, pairs):
    """A judge that tosses a coin: what it draws must repeat with the run."""
    return [random.choice((0, 1, 1, -1)) for _ in pairs]
'''


@dataclass(frozen=True)
class Run:
    """A recipe with a descriptive name and its number of ranks."""

    name: str
    ranks: int
    options: dict[str, Any]


def make_world(folder: Path) -> None:
    """Write the models, rows and code of all runs."""
    helpers = test_helpers()
    for kind, name, seed in (("tied", "policy", 1), ("tied", "reference", 2), ("moe", "moe", 3)):
        helpers.make_model(folder / name, kind, seed=seed)
    helpers.make_classifier(folder / "classifier", "untied", seed=4)
    (folder / "code.py").write_text(REWARDS + _JUDGE)
    pairs = [row | {"margin": 0.25 * (n % 4)} for n, row in enumerate(helpers.paired_rows(30, seed=5))]
    for name, rows in {"labeled": helpers.unpaired_rows(30, seed=4), "pairs": pairs}.items():
        write_rows(folder / name / "train.jsonl", rows[:22])
        write_rows(folder / name / "test.jsonl", rows[22:])


# Windows of 8 rows for any number of ranks, 22 rows and 5 steps: three windows per epoch, the last one with 6 rows.
_COMMON: dict[str, Any] = {
    "max_steps": 5,
    "learning_rate": 1e-3,
    "warmup_ratio": 0.4,
    "weight_decay": 0.1,
    "max_length": 64,
    "logging_steps": 2,
    "logging_first_step": True,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "per_device_eval_batch_size": 2,
    "dataset_test_split": "test",
    "save_strategy": "steps",
    "save_steps": 4,
    "disable_tqdm": True,
    "seed": 3,
}


def _methods(world: Path) -> dict[str, dict[str, Any]]:
    """Return the options of each method, by name of the run."""
    policy, labeled, pairs = (str(world / name) for name in ("policy", "labeled", "pairs"))
    reference = {"ref_model_name_or_path": str(world / "reference")}
    online = {
        **{"method": "online_dpo", "model_name_or_path": policy, "dataset_name": pairs, **reference},
        **{"max_new_tokens": 8, "rollout_batch_size": 4, "missing_eos_penalty": 0.5, "beta": 0.3},
    }
    kto = {"method": "kto", "dataset_name": labeled, "max_prompt_length": None, "beta": 0.3}
    cpo = {"method": "cpo", "dataset_name": pairs, "max_prompt_length": None, "beta": 0.2}
    moe = {"model_name_or_path": str(world / "moe"), "router_aux_loss_coef": 0.02}
    return {
        "kto": {**kto, "model_name_or_path": policy, "desirable_weight": 1.3, "stratify_labels": True},
        "kto-other-reference": {**kto, "model_name_or_path": policy, **reference, "max_grad_norm": 0.1},
        "kto-moe": {**kto, **moe},
        "cpo": {**cpo, "model_name_or_path": policy, "label_smoothing": 0.1, "max_tokens_per_batch": 128},
        "cpo-moe": {**cpo, **moe, "loss_type": "simpo", "optim": "sgd"},
        "online_dpo-function": {**online, "reward_funcs": f"{world}/code.py:letters", "num_generations": 3},
        "online_dpo-model": {**online, "reward_model_path": str(world / "classifier"), "loss_type": "ipo"},
        "online_dpo-judge": {**online, "judge": f"{world}/code.py:tossed", "missing_eos_penalty": None},
        "sft": {
            **{"method": "sft", "model_name_or_path": policy, "dataset_name": pairs, "max_prompt_length": None},
            **{"column_map": {"completion": "chosen"}, "disable_dropout": False, "full_determinism": True},
        },
        "reward": {
            **{"method": "reward", "model_name_or_path": policy, "dataset_name": pairs, "max_prompt_length": None},
            **{"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_steps": 3},
        },
        "dpo": {
            **{"method": "dpo", "model_name_or_path": policy, "dataset_name": pairs, **reference},
            **{"beta": 0.3, "label_smoothing": 0.1},
        },
    }


def runs(world: Path, quick: bool) -> list[Run]:
    """Return every method at every ZeRO stage, with and without offload, on one and two ranks.

    With ``quick``, each method runs on two of these engines, so that each engine runs two methods.
    """
    stages, found = test_helpers().STAGES, []
    engines = [(stage, ranks, settings) for stage, settings in stages.items() for ranks in (1, 2)]
    for number, (name, options) in enumerate(_methods(world).items()):
        for place, (stage, ranks, settings) in enumerate(engines):
            if quick and place not in (number % len(engines), (number + 3) % len(engines)):
                continue
            found.append(Run(f"{name}-{stage}-{ranks}", ranks, _recipe(options, stage, ranks, settings)))
    return found


def _recipe(options: dict[str, Any], stage: str, ranks: int, settings: dict[str, Any]) -> dict[str, Any]:
    more: dict[str, Any] = {"deepspeed": settings, "per_device_train_batch_size": 2}
    more["gradient_accumulation_steps"] = 4 // ranks
    if options["method"] in ("kto", "dpo", "online_dpo"):
        more["ref_placement"] = ("replica", "sharded", "offload")[(len(stage) + ranks) % 3]
    if options["method"] == "online_dpo" and stage.startswith("stage3"):
        more["ds3_gather_for_generation"] = ranks == 1  # otherwise it depends on free memory, like the batch size
    return {**_COMMON, **more, **options}
