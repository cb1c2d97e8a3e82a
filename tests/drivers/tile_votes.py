"""Two ranks, of which first one and then both can use the head's kernels; each prints the common decision."""

from __future__ import annotations

import torch
import torch.distributed as dist

from alignment.models.tiles.choice import _on_every_rank

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for able in (1, 2):
        print(f"{dist.get_rank()}:{_on_every_rank(dist.get_rank() < able, torch.device('cpu'))}", flush=True)
    dist.destroy_process_group()
