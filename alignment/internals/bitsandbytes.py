"""bitsandbytes: what it logs while it is imported."""

from __future__ import annotations

import logging


def hush_missing_kernel() -> None:
    """Silence the warning about an optional kernel for 4-bit layers on CPUs, whether or not bitsandbytes is imported.

    transformers imports bitsandbytes by way of peft, also for models without 4-bit layers. The warning has no other
    switch than the logger of the module that looks for the kernel. Seen with bitsandbytes 0.50.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
