"""Two ranks, of which first one and then both can use the head's kernels; each prints the common decision."""

from __future__ import annotations

import torch.distributed as dist

from alignment.engines.collectives import true_on_every_rank

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for able in (1, 2):
        print(f"{dist.get_rank()}:{true_on_every_rank(dist.get_rank() < able)}", flush=True)
    dist.destroy_process_group()
