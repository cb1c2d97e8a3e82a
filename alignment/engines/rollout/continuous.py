"""The ``continuous`` backend: transformers' continuous batching on each rank alone, one prefill for each prompt.

Sequences leave the batch as they end, and nothing waits for another rank. transformers' ``generate_batch`` itself is
not used: it starts generating while requests still come in, so that what shares a batch, and with it what is drawn,
depends on the speed of two threads; and it returns what it has when its thread fails.
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
from alignment.engines.garbage import old_objects_spared
from alignment.engines.rollout.backend import Completion, Generation, RolloutBackend, Sampling, Work
from alignment.engines.rollout.memory import pages
from alignment.engines.rollout.processors import generation_config
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

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig

_PAGE_TOKENS = 32
_FLASH_2_PAGE_TOKENS = 256  # flash_attn_with_kvcache refuses pages whose size is not a multiple of it
_LARGEST_BATCH = 2048  # tokens of one forward pass; longer prefills are cut
_LOOK_S = 1.0  # how often to see whether the generating thread is alive


# Continuous batching hands a processor the scores alone, without the tokens before them. transformers marks those that
# are content with that, but has not judged this one yet.
_SCORES_ALONE = ("MinPLogitsWarper",)


class ContinuousBackend(RolloutBackend):
    """Requests are queued, then generated; where one ends, another takes its place."""

    name = "continuous"
    needs_whole_weights = True
    unit = "seq"

    def __init__(self) -> None:
        self._kept: Any = None  # the manager of a session
        self._begun = False  # whether it has answered a chunk

    def page_tokens(self, model: PreTrainedModel) -> int:
        """256 where FlashAttention-2 decodes from the pages, 32 with any other attention."""
        return _FLASH_2_PAGE_TOKENS if decodes_from_pages(model.config, version=2) else _PAGE_TOKENS

    def pays(self, model: PreTrainedModel) -> bool:
        """On a GPU with a flash kernel, which alone reads a paged cache in place.

        Other kernels copy and mask the whole of it for every token. On a CPU (4 layers of width 256, vocabulary 32000,
        8 prompts of 20 to 120 tokens twice, 64 new ones) it took 1.1 to 1.3 times as long as ``generate`` where every
        completion ran to its full length, and 0.7 times as long where one token in 40 ended one: ask for it where
        completions end early at very different lengths.
        """
        return device().type == "cuda" and is_flash_attention_requested(model.config)

    def ticks(self, chunk: Sequence[Work], sampling: Sampling) -> int:
        """One for each completion."""
        return sum(work.count for work in chunk)

    def obstacle(self, model: PreTrainedModel, sampling: Sampling) -> str | None:
        """What transformers' continuous batching does not support, or None."""
        if not hasattr(getattr(transformers, "ContinuousBatchingConfig", None), "page_size"):
            return f"transformers {transformers.__version__} lacks the continuous batching that 5.20 has"
        for processor in logits_processors(model, generation_config(sampling)):
            name = type(processor).__name__
            if not works_in_continuous_batching(processor) and name not in _SCORES_ALONE:
                return f"transformers' continuous batching does not support {name}"
        architecture, config = type(model).__name__, model.config.get_text_config()
        if not supports_paged_attention(model):
            return f"transformers' continuous batching does not support {architecture}"
        # Compressed or shared keys and values have no place in its cache.
        if getattr(config, "kv_lora_rank", None) or getattr(config, "num_kv_shared_layers", None):
            return f"transformers' continuous batching does not support the cache of {architecture}"
        # Its eager attention is not the model's own: it knows no soft cap and no sinks.
        attention = attention_implementation(model)
        if attention != "sdpa" and not is_flash_attention_requested(model.config):
            return f"it computes attention by sdpa or a flash kernel, and {architecture} was loaded with {attention}"
        layers = paged_cache_obstacle(config)
        return layers and f"transformers' continuous batching does not support {architecture} ({layers})"

    @contextlib.contextmanager
    def session(self, parts: Sequence[Sequence[Work]], generation: Generation) -> Iterator[None]:
        """One manager for all chunks: its cache is made and, on a GPU, its graphs are captured once for a rollout.

        Not for longer: graphs hold the addresses of the weights, which ZeRO-3 gathers elsewhere every time, and the
        cache would take its memory from training.
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
        """As :meth:`RolloutBackend.generate` says; chunks outside a session have a manager each."""
        if self._kept is None:
            with self.session([chunk], generation):
                return self.generate(chunk, generation)
        found: dict[str, Any] = {}
        sampling, logps, manager = generation.sampling, generation.logps, self._kept
        with old_objects_spared():
            for place, work in enumerate(chunk):
                # A copy is made one token before the end of the prompt, which transformers cannot compute if it is
                # empty.
                together = work.count if len(work.ids) > 1 else 1
                set_copies(manager, together)
                for name in _names(place, work)[::together]:
                    if manager.add_request(list(work.ids), request_id=name) is None:
                        _check("a prompt was refused")
            if self._begun:
                torch.manual_seed(int(torch.randint(2**31, ())))  # as for the first chunk, by its manager
            self._begun = True
            # Only now: the first batch holds the same requests in every run.
            manager.start()
            while len(found) < sum(work.count for work in chunk):
                result = manager.get_result(timeout=_LOOK_S)
                if result is not None:
                    _check(result.error)
                    found[result.request_id] = result
                    generation.tick()
                elif generation_error(manager) is not None or not manager.is_running():
                    _check(generation_error(manager) or "its thread has ended")
            stop_keeping_graphs(manager)
        return [
            [_completion(found[name], sampling, logps) for name in _names(place, work)]
            for place, work in enumerate(chunk)
        ]


def _names(place: int, work: Work) -> list[str]:
    """What transformers calls a request and its copies."""
    return request_names(str(place), work.count)


def _completion(result: Any, sampling: Sampling, logps: bool) -> Completion:
    return Completion.cut(result.generated_tokens, sampling, result.logprobs if logps else None)


def _check(error: object) -> None:
    if error:
        raise TrainingError(
            f"rollout_backend='continuous': generating failed ({' '.join(str(error).split())}); set a smaller "
            "rollout_batch_size, or rollout_backend: generate"
        )


@contextlib.contextmanager
def _manager(generation: Generation, sizes: ContinuousBatchingConfig) -> Iterator[Any]:
    """A manager that holds no more memory than its sizes say, and is gone on any exit."""
    model = generation.model
    attention, manager = attention_implementation(model), None
    with continuous_batching_hushed():  # what goes wrong is raised here
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
    """Room for every completion of the largest chunk at its full length, whatever memory there is."""
    from transformers import ContinuousBatchingConfig  # older releases have none, and are refused by obstacle()

    new = generation.sampling.max_new_tokens
    completions = max(sum(work.count for work in part) for part in parts)
    prompts = max(sum(len(work.ids) for work in part) for part in parts)
    longest = max(len(work.ids) for part in parts for work in part) + new
    return ContinuousBatchingConfig(
        page_size=page,
        num_blocks=max(sum(work.count * pages(len(work.ids) + new, page) for work in part) for part in parts),
        # transformers' own answer is 32, and a longer sequence would decode the slow way.
        max_blocks_per_request=pages(longest, page) if decodes_from_pages(generation.model.config) else 0,
        max_batch_tokens=max(completions, min(prompts, _LARGEST_BATCH)),
        max_requests_per_batch=completions,
        max_memory_percent=1.0,
        safety_margin=0.0,
        # A prompt that another one's pages hold but for its last token would be scheduled without any token.
        allow_block_sharing=False,
        # Drawn, not the request's seed: each chunk has its own, and transformers seeds torch with the first one's.
        seed=int(torch.randint(2**31, ())),
        return_logprobs=generation.logps,
        # The attention that was loaded is the attention that generates.
        auto_switch_to_flash=False,
        disable_nccl_graph_mixing=False,
    )
