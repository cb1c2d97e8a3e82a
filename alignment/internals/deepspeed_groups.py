"""DeepSpeed: the process groups that it creates in addition to the default one."""

from __future__ import annotations

import functools
from datetime import timedelta


def set_timeout_of_new_groups(timeout: timedelta) -> None:
    """Set the timeout of all groups that DeepSpeed creates from now on.

    It reduces gradients and gathers weights in a copy of the default group that is created without a timeout: torch
    then uses the backend's default, 10 minutes with NCCL, regardless of the default group. Neither a setting nor an
    argument changes that. Seen with DeepSpeed 0.19.8.
    """
    import torch
    from deepspeed.comm import comm

    comm.cdb.new_group = functools.partial(torch.distributed.new_group, timeout=timeout)
