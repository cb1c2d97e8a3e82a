"""Train adapters as ``runs.py`` trains models, and record them before the first and after every step.

Usage: adapter_runs.py SPEC. ``NAME/step-N`` has the adapters after step N, as they are saved but for the tokenizer.
``NAME.json`` has as well, under ``before`` and ``after`` training, the digests of ``frozen`` and ``trained`` weights.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.drivers.runs import canned, one_run
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from alignment.checkpoint.saving import gathered_state_dict, write_adapters
from alignment.cli.guarded import guarded
from alignment.rollout.engine import RolloutEngine
from alignment.training.trainer import AlignmentTrainer


def digest(tensor: Tensor) -> str:
    """Digest of a tensor's bits, dtype and shape."""
    kept = hashlib.sha1(repr((tensor.dtype, tuple(tensor.shape))).encode())
    kept.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return kept.hexdigest()


def packed_with(model: PreTrainedModel) -> dict[str, Tensor]:
    """bitsandbytes' state of packed weights, by the name of the parameter or module."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            found |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
    for name, module in model.named_modules():
        for key in ("CB", "SCB"):
            for owner in (getattr(module, "state", None), getattr(module, "weight", None)):
                if isinstance(getattr(owner, key, None), Tensor):
                    found[f"{name}.{key}"] = getattr(owner, key)
    return found


def digests(model: PreTrainedModel) -> dict[str, dict[str, str]]:
    """Digests of ``frozen`` and ``trained`` parameters, unsharded at any ZeRO stage. Collective."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = gathered_state_dict(model, keep=True) | packed_with(model)
    return {
        "frozen": {name: digest(value) for name, value in state.items() if name not in trained},
        "trained": {name: digest(value) for name, value in state.items() if name in trained},
    }


class Recorder(TrainerCallback):
    """Saves the adapters at every step."""

    def __init__(self, trainer: AlignmentTrainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self.found: dict[str, Any] = {}
        trainer.add_callback(self)

    @property
    def model(self) -> PreTrainedModel:
        """The model inside the engine."""
        return self.trainer.engines.policy.scorer.model

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.found["before"] = digests(self.model)
        self._save(0)

    def on_step_end(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        self._save(state.global_step)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.found["after"] = digests(self.model)

    def _save(self, step: int) -> None:
        plan, folder = self.trainer.planned.engines, self.folder / f"step-{step}"
        first = self.trainer.is_world_process_zero()
        write_adapters(self.model, plan.adapters, plan.source, None, folder, first_rank=first)


def main() -> None:
    """Run everything that the file lists."""
    RolloutEngine.generate = canned  # type: ignore[method-assign]
    mock.patch("alignment.training.run_page.draw_page").start()
    spec = Path(sys.argv[1])
    for run in json.loads(spec.read_text()):
        one_run(run, spec.parent, lambda trainer, place=spec.parent / run["name"]: Recorder(trainer, place).found)


if __name__ == "__main__":
    sys.exit(guarded(main))
