"""Count how often the host waits for the device, per micro-batch and per step, on a machine without a GPU.

    python benchmarks/host_waits.py
    python benchmarks/host_waits.py --package ../other-checkout    # the same for another version

Waits in rollouts are excluded. ``ours`` are waits caused by this project's code, the others are caused by libraries
within a step; see :mod:`tools.waits`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
if "--package" in sys.argv[:-1]:  # before it is imported
    sys.path.insert(0, str(Path(sys.argv[sys.argv.index("--package") + 1]).resolve()))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

if TYPE_CHECKING:
    from alignment.training.trainer import AlignmentTrainer

METHODS, STAGES = ("KTO", "CPO", "OnlineDPO"), (0, 2, 3)
_BATCH = 2


def _rows(method: str, count: int) -> list[dict[str, Any]]:
    """Return rows of equal lengths, so that every micro-batch costs the same."""
    made = []
    for number in range(count):
        prompt, answers = "w1 w2 w3", [f" w{7 + number % 5} w{side} w9 w10" for side in (3, 4)]
        if method == "KTO":
            made.append({"prompt": prompt, "completion": answers[0], "label": number % 2 == 0})
        elif method == "CPO":
            made.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
        else:
            made.append({"prompt": prompt})
    return made


def _lengths(completions: Sequence[str], **_: Any) -> list[float]:
    """A reward that is unlikely to be equal for two completions."""
    return [float(sum(map(ord, text)) % 8191) for text in completions]


def maker(method: str, stage: int, model: str, folder: Path) -> Callable[[int], AlignmentTrainer]:
    """Return a function that creates trainers of a tiny model, for :func:`tools.waits.run.waits_of`.

    Args:
        method: one of :data:`METHODS`.
        stage: ZeRO stage.
        model: folder of the model.
        folder: output folder for runs.
    """
    import alignment
    from benchmarks.shapes import load_tokenizer
    from tools.waits.run import STEPS

    def make(micro_batches: int) -> AlignmentTrainer:
        options: dict[str, Any] = {
            "output_dir": str(folder / f"{method}-{stage}-{micro_batches}"),
            "per_device_train_batch_size": _BATCH,
            "gradient_accumulation_steps": micro_batches,
            "max_steps": STEPS,
            "learning_rate": 1e-6,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "deepspeed": f"zero{stage}",
        }
        more: dict[str, Any] = {}
        if method == "OnlineDPO":
            options |= {"max_new_tokens": 8, "beta": 0.1}
            more["reward_funcs"] = _lengths
        trainer: AlignmentTrainer = getattr(alignment, f"{method}Trainer")(
            model=model,
            args=getattr(alignment, f"{method}Config")(**options),
            train_dataset=_rows(method, STEPS * micro_batches * _BATCH),
            processing_class=load_tokenizer(model),
            **more,
        )
        return trainer

    return make


def main() -> None:
    """Print a table, and with ``--places`` every location that waits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", help="folder with another version of the package (default: this one)")
    parser.add_argument("--places", action="store_true", help="list the locations that wait")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="host-waits-") as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        from benchmarks.shapes import TINY, write_model
        from tools.waits.run import MANY, OWNERS, places, shares, waits_of

        write_model(folder / "model", TINY)
        lines, listed = [], []
        for method in METHODS:
            for stage in STAGES:
                found = waits_of(maker(method, stage, str(folder / "model"), folder))
                cells = (f"{share.micro_batch:g} / {share.step:g}" for share in shares(found).values())
                lines.append(f"| {method}, stage {stage} | {' | '.join(cells)} |")
                listed += [f"{method}, stage {stage}: {count} {place}" for count, place in places(found[MANY])]
    print(f"\n| waits per micro-batch / per step | {' | '.join(OWNERS)} |\n|---|{'--:|' * len(OWNERS)}")
    print("\n".join([*lines, "", *(listed if given.places else ())]))


if __name__ == "__main__":
    main()
