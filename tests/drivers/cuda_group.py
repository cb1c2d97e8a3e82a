"""One rank in a group without a backend for tensors in host memory, as with NCCL: injects adapters."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from alignment.models.adapters.given import Given, equip
from alignment.models.adapters.record import Adapters
from alignment.models.tasks import CAUSAL_LM

if __name__ == "__main__":
    dist.init_process_group("cuda:gloo")
    try:
        dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        print(error)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    CAUSAL_LM.scorer(model, False)
    targets = ["q_proj", "down_proj"]
    layers = tuple(name for name, _ in model.named_modules() if name.rpartition(".")[2] in targets)
    adapters = Adapters(LoraConfig(target_modules=targets, task_type="CAUSAL_LM"), layers=layers)
    asked: list[bool] = []
    given = equip(
        model, adapters, ds_config={}, dtype=torch.float32, seed=0, keep=True,
        agreed=lambda mine: asked.append(mine) is None and mine,
    )  # fmt: skip
    assert asked == [True] and given == Given(None)
    print("equipped")
