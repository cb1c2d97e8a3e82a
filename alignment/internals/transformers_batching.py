"""transformers' continuous batching: managers that outlive a batch, and the kernels that read its pages.

Everything else about continuous batching is in :mod:`.transformers`.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_WITH_PAGES = (2, 3)  # versions of FlashAttention whose flash_attn_with_kvcache reads pages


def decodes_from_pages(config: PretrainedConfig, version: int | None = None) -> bool:
    """Whether single tokens are decoded by ``flash_attn_with_kvcache``, which reads the pages in place.

    Only FlashAttention 2 and 3 do so, under many names, including hub kernels. Version 2 supports only page sizes that
    are multiples of 256 tokens, which transformers does not check. Seen with transformers 5.23.

    Args:
        config: configuration of the model.
        version: 2 or 3; None for either.
    """
    from transformers.utils import generic

    return bool(
        generic.is_flash_attention_requested(config, version=list(_WITH_PAGES) if version is None else version)
    )


def stop_keeping_graphs(manager: Any) -> None:
    """Stop the thread of a manager that has completed all requests, keeping its cache and CUDA graphs.

    Requests that are added afterwards wait for the next ``start``; a running thread would begin with those that happen
    to have been added. A stopped manager rejects requests until its status is cleared, and is recorded on the model.
    Seen with transformers 5.23.
    """
    manager.stop(block=True, hard_stop=True, keep_for_next_session=True)
    manager.background_thread_status.clear()


def forget_manager(model: PreTrainedModel, manager: Any) -> None:
    """Release the cache and the graphs of a manager whose thread has stopped, and the model's reference to it.

    ``stop`` releases them only if a thread is running. Seen with transformers 5.23.
    """
    manager.batch_processor = None
    model.destroy_cached_continuous_batching_manager()
    manager.destroy()
    gc.collect()
