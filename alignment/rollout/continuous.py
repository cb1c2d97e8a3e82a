"""The ``continuous`` backend: transformers' continuous batching on each rank, with one prefill per prompt.

Sequences leave the batch as they end, and no rank waits for another. transformers' ``generate_batch`` itself is not
used: it starts generating while requests still arrive, so that the composition of a batch, and with it the samples,
depend on the timing of two threads; and it returns partial results if its thread fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedModel

from alignment.config.errors import TrainingError
from alignment.engines.collectives import device
from alignment.engines.start_up import old_objects_spared
from alignment.internals.transformers import (
    attention_implementation,
    continuous_batching_hushed,
    generation_error,
    is_flash_attention_requested,
    logits_processors,
    paged_cache_obstacle,
    request_names,
    set_copies,
    supports_paged_attention,
    works_in_continuous_batching,
)
from alignment.internals.transformers_batching import decodes_from_pages, forget_manager, stop_keeping_graphs
from alignment.models.experts import packed_experts
from alignment.rollout.backend import Completion, Generation, RolloutBackend, Sampling, Work
from alignment.rollout.memory import pages
from alignment.rollout.processors import generation_config

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig

_PAGE_TOKENS = 32
_FLASH_2_PAGE_TOKENS = 256  # flash_attn_with_kvcache requires pages of a multiple of this size
_LARGEST_BATCH = 2048  # tokens of one forward pass; longer prefills are split
_LOOK_S = 1.0  # interval between two checks of the generating thread
# Continuous batching passes only the scores to a processor, without the preceding tokens. transformers marks the
# processors for which this suffices, but has not marked this one yet.
_SCORES_ALONE = ("MinPLogitsWarper",)


class ContinuousBackend(RolloutBackend):
    """Queues all requests, then generates; when one ends, another takes its place."""

    name = "continuous"
    needs_whole_weights = True

    def __init__(self) -> None:
        self._kept: Any = None  # manager of the session
        self._begun = False  # whether it has generated a chunk

    def page_tokens(self, model: PreTrainedModel) -> int:
        """256 if FlashAttention-2 decodes from the pages, 32 with any other attention."""
        return _FLASH_2_PAGE_TOKENS if decodes_from_pages(model.config, version=2) else _PAGE_TOKENS

    def pays(self, model: PreTrainedModel) -> bool:
        """Whether this is a GPU with a flash kernel; others copy and mask the entire cache for every token."""
        return device().type == "cuda" and is_flash_attention_requested(model.config)

    def obstacle(self, model: PreTrainedModel, sampling: Sampling) -> str | None:
        """What transformers' continuous batching does not support, or None."""
        if not hasattr(getattr(transformers, "ContinuousBatchingConfig", None), "page_size"):
            return f"transformers {transformers.__version__} lacks the continuous batching of release 5.20"
        for processor in logits_processors(model, generation_config(sampling)):
            name = type(processor).__name__
            if not works_in_continuous_batching(processor) and name not in _SCORES_ALONE:
                return f"transformers' continuous batching does not support {name}"
        architecture, config = type(model).__name__, model.config.get_text_config()
        if not supports_paged_attention(model):
            return f"transformers' continuous batching does not support {architecture}"
        # Its cache does not support compressed or shared keys and values.
        if getattr(config, "kv_lora_rank", None) or getattr(config, "num_kv_shared_layers", None):
            return f"transformers' continuous batching does not support the cache of {architecture}"
        # Its eager attention is not the model's own: it supports neither soft caps nor sinks.
        attention = attention_implementation(model)
        if attention != "sdpa" and not is_flash_attention_requested(model.config):
            return f"it requires sdpa or flash attention, but {architecture} was loaded with {attention}"
        if packed_experts(model):
            return "its CUDA graphs do not support quantized experts, whose product reads the numbers of tokens"
        layers = paged_cache_obstacle(config)
        return layers and f"transformers' continuous batching does not support {architecture} ({layers})"

    @contextlib.contextmanager
    def session(self, parts: Sequence[Sequence[Work]], generation: Generation) -> Iterator[None]:
        """Use one manager for all chunks: its cache and, on a GPU, its graphs are created once per rollout.

        It does not outlive the rollout: graphs contain the addresses of the weights, which ZeRO-3 gathers elsewhere
        every time, and the cache would occupy memory during training.
        """
        if not parts:
            yield
            return
        sizes = _sizes(parts, generation, self.page_tokens(generation.model))
        with old_objects_spared(), _manager(generation, sizes) as manager:
            self._kept, self._begun = manager, False
            try:
                yield
            finally:
                self._kept = None

    def generate(self, chunk: Sequence[Work], generation: Generation) -> list[list[Completion]]:
        """See :meth:`RolloutBackend.generate`; a chunk outside a session gets its own manager."""
        if self._kept is None:
            with self.session([chunk], generation):
                return self.generate(chunk, generation)
        found: dict[str, Any] = {}
        names = [request_names(str(place), work.count) for place, work in enumerate(chunk)]
        manager = self._kept
        with old_objects_spared():
            for work, each in zip(chunk, names):
                # Copies are made one token before the end of the prompt; transformers fails if nothing precedes it.
                together = work.count if len(work.ids) > 1 else 1
                set_copies(manager, together)
                for name in each[::together]:
                    if manager.add_request(list(work.ids), request_id=name) is None:
                        _check("a prompt was rejected")
            if self._begun:
                torch.manual_seed(int(torch.randint(2**31, ())))  # the manager does this for the first chunk
            self._begun = True
            # Start only now, so that the first batch contains the same requests in every run.
            manager.start()
            while len(found) < sum(map(len, names)):
                result = manager.get_result(timeout=_LOOK_S)
                if result is not None:
                    _check(result.error)
                    found[result.request_id] = result
                    generation.tick()
                elif generation_error(manager) is not None or not manager.is_running():
                    _check(generation_error(manager) or "its thread has exited")
            stop_keeping_graphs(manager)
        return [[Completion.cut(found[name].generated_tokens, generation.sampling) for name in each] for each in names]


def _check(error: object) -> None:
    if error:
        raise TrainingError(
            f"rollout_backend='continuous': generation failed ({' '.join(str(error).split())}); set a smaller "
            "rollout_batch_size, or rollout_backend: generate"
        )


@contextlib.contextmanager
def _manager(generation: Generation, sizes: ContinuousBatchingConfig) -> Iterator[Any]:
    """A manager that uses no more memory than its sizes specify; released on any exit."""
    model = generation.model
    attention, manager = attention_implementation(model), None
    with continuous_batching_hushed():  # errors are raised here
        try:
            manager = model.init_continuous_batching(generation_config(generation.sampling), sizes)
            yield manager
        finally:
            if manager is not None:
                manager.stop(block=True, hard_stop=True)
                forget_manager(model, manager)
            if attention_implementation(model) != attention:
                model.set_attn_implementation(attention)


def _sizes(parts: Sequence[Sequence[Work]], generation: Generation, page: int) -> ContinuousBatchingConfig:
    """Space for all completions of the largest chunk at their maximum length, regardless of the available memory."""
    from transformers import ContinuousBatchingConfig  # missing in older releases, which obstacle() rejects

    new = generation.sampling.max_new_tokens
    completions = max(sum(work.count for work in part) for part in parts)
    prompts = max(sum(len(work.ids) for work in part) for part in parts)
    longest = max(len(work.ids) for part in parts for work in part) + new
    return ContinuousBatchingConfig(
        page_size=page,
        num_blocks=max(sum(work.count * pages(len(work.ids) + new, page) for work in part) for part in parts),
        # transformers' default is 32, and longer sequences would decode slowly.
        max_blocks_per_request=pages(longest, page) if decodes_from_pages(generation.model.config) else 0,
        max_batch_tokens=max(completions, min(prompts, _LARGEST_BATCH)),
        max_requests_per_batch=completions,
        max_memory_percent=1.0,
        safety_margin=0.0,
        # A prompt whose tokens, except the last, are all in another one's pages would be scheduled without any token.
        allow_block_sharing=False,
        # Drawn instead of the request's seed: each chunk has its own, and transformers seeds torch with the first one.
        seed=int(torch.randint(2**31, ())),
        # Generate with the attention that the model was loaded with.
        auto_switch_to_flash=False,
        disable_nccl_graph_mixing=False,
    )
