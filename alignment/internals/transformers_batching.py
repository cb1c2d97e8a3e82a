"""transformers' continuous batching: managers that outlive a batch, and the kernels that read its pages.

What else is touched of it is in :mod:`.transformers`.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_WITH_PAGES = (2, 3)  # versions of FlashAttention whose flash_attn_with_kvcache reads pages


def decodes_from_pages(config: PretrainedConfig, version: int | None = None) -> bool:
    """Whether single tokens are decoded by ``flash_attn_with_kvcache``, which reads the pages in place.

    Only FlashAttention 2 and 3 do so, under many names, hub kernels among them. Version 2 takes pages of a multiple
    of 256 tokens only, which transformers does not check. Seen with transformers 5.23.

    Args:
        config: the model's.
        version: 2 or 3; None for either.
    """
    from transformers.utils import generic

    return bool(
        generic.is_flash_attention_requested(config, version=list(_WITH_PAGES) if version is None else version)
    )


def stop_keeping_graphs(manager: Any) -> None:
    """End the generating thread of a manager that has answered everything; its cache and its CUDA graphs stay.

    Requests that are added afterwards wait for its next ``start``; a thread that ran would begin with whatever had
    been added by then. A manager that was stopped refuses requests until its status is cleared, and is noted on the
    model. Seen with transformers 5.23.
    """
    manager.stop(block=True, hard_stop=True, keep_for_next_session=True)
    manager.background_thread_status.clear()


def forget_manager(model: PreTrainedModel, manager: Any) -> None:
    """Release the cache and the graphs of a manager whose thread has ended, and the model's note of it.

    ``stop`` releases them only where a thread is running. Seen with transformers 5.23.
    """
    manager.batch_processor = None
    model.destroy_cached_continuous_batching_manager()
    manager.destroy()
    gc.collect()
