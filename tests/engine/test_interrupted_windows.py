"""A run that an error or Ctrl-C has ended within a window leaves nothing to the next ``train()`` of its trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.helpers import STAGES, options, unpaired_rows, zero
from transformers import TrainerCallback

from alignment import SFTConfig, SFTTrainer

pytestmark = pytest.mark.usefixtures("own_process_group")
ENGINES = {**STAGES, "stage1": zero(1)}
# Bare optimizers and partitioned weights by default.
STAGES_BY_DEFAULT = [
    pytest.param(stage, marks=() if stage in ("stage0", "stage3") else pytest.mark.ci) for stage in sorted(ENGINES)
]


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


class Interrupting(TrainerCallback):
    """Interrupts the first window between micro-batches, or within the forward or backward pass of one.

    Args:
        place: where.
        after: the number of micro-batches before it.
    """

    def __init__(self, place: str, after: int) -> None:
        self.place, self.after = place, after
        self.hook: Any = None

    def on_substep_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.after -= 1
        if self.after:
            return
        layer = model.model.layers[0].mlp
        if self.place == "forward":
            self.hook = layer.register_forward_hook(interrupt)
        elif self.place == "backward":
            self.hook = layer.register_forward_hook(lambda *given: given[-1].register_hook(interrupt) and None)
        else:
            interrupt()


def make(model: str, folder: Path, stage: str, **more: Any) -> SFTTrainer:
    given = {"gradient_accumulation_steps": 3, "max_steps": 2, "optim": "sgd"}
    return SFTTrainer(
        model=model,
        args=SFTConfig(**options(folder, deepspeed=ENGINES[stage], **{**given, **more})),
        train_dataset=unpaired_rows(12, 3),
    )


def trained(trainer: SFTTrainer) -> tuple[list[float], bytes]:
    """Train; return the norms of the run's gradients and the weights."""
    trainer.train()
    trainer.save_model()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    trainer.close()
    return norms, (trainer.output_dir / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.ci)])
@pytest.mark.parametrize("stage", STAGES_BY_DEFAULT)
def test_the_next_run_starts_without_gradients(stage: str, dtype: str, model: str, tmp_path: Path) -> None:
    """Weights and gradient norms equal those of a run that was not interrupted."""
    bf16 = dtype == "bf16"
    fresh = trained(make(model, tmp_path / "fresh", stage, bf16=bf16))
    assert len(fresh[0]) == 2 and min(fresh[0]) > 0
    trainer = make(model, tmp_path / "interrupted", stage, bf16=bf16)
    for place, after in (("between", 2), ("forward", 1), ("backward", 1), ("backward", 2)):
        interrupting = Interrupting(place, after)
        trainer.add_callback(interrupting)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.remove_callback(interrupting)
        if interrupting.hook is not None:
            interrupting.hook.remove()
    assert trained(trainer) == fresh


@pytest.mark.parametrize("stage", STAGES_BY_DEFAULT)
def test_a_finished_run_leaves_nothing_to_discard(stage: str, model: str, tmp_path: Path) -> None:
    """Without a gradient, there is nothing to clip: the next run starts all the same."""
    trainer = make(model, tmp_path, stage)
    trainer.train()
    assert len(trained(trainer)[0]) == 2
