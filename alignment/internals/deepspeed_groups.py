"""DeepSpeed: the process groups that it makes beside the default one."""

from __future__ import annotations

import functools
from datetime import timedelta


def set_timeout_of_new_groups(timeout: timedelta) -> None:
    """Let ranks wait so long for each other in every group that DeepSpeed makes from now on.

    It reduces gradients and gathers weights in a copy of the default group, made without a limit of its own: torch
    then takes the backend's, 10 minutes on NCCL, whatever the default group has. Neither a setting nor an argument
    reaches it. Seen with DeepSpeed 0.19.8.
    """
    import torch
    from deepspeed.comm import comm

    comm.cdb.new_group = functools.partial(torch.distributed.new_group, timeout=timeout)
