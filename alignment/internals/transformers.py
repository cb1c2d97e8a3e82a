"""transformers: its DeepSpeed flag, models and tokenizers, callbacks, logits processors, and continuous batching.

The functions from :func:`is_flash_attention_requested` on concern continuous batching, which changes with every
release.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PretrainedConfig, PreTrainedModel


@contextlib.contextmanager
def loading(ds_config: dict[str, Any] | None) -> Iterator[None]:
    """Make ``from_pretrained`` follow ``ds_config``, and only it, within this context.

    transformers keeps its DeepSpeed configuration in a process-wide weak reference: at stage 3, while it is alive, any
    model that is loaded is partitioned and every ``generate`` synchronizes. It therefore lives for one load, and the
    previous one is restored. ``HfDeepSpeedConfig`` sets the reference, but nothing public reads or restores it
    (transformers #28106 requests a way to load one model without it). Seen with transformers 5.23.
    """
    from transformers.integrations import deepspeed as hf_deepspeed

    before = hf_deepspeed._hf_deepspeed_config_weak_ref
    try:
        hf_deepspeed.unset_hf_deepspeed_config()
        _holder = hf_deepspeed.HfDeepSpeedConfig(copy.deepcopy(ds_config)) if ds_config is not None else None
        yield
    finally:
        hf_deepspeed._hf_deepspeed_config_weak_ref = before


def parameter_names_outside(model: nn.Module, layers: Sequence[type[nn.Module]], patterns: Sequence[str]) -> list[str]:
    """The names of parameters that are not in layers of these types and match none of the patterns (in lower case).

    ``Trainer`` uses this function to select the parameters with weight decay; using it here selects the same ones. It
    is not exported. Seen with transformers 5.23.
    """
    from transformers.trainer_pt_utils import get_parameter_names

    return list(get_parameter_names(model, list(layers), list(patterns)))


@contextlib.contextmanager
def deciding_on_packing(
    decide: Callable[[Tensor, Callable[[Tensor], Tensor | None]], Tensor | None], known: Callable[[], bool]
) -> Iterator[None]:
    """Let ``decide`` tell, within this context, whether rows without an attention mask are packed sequences.

    It receives the positions that the model made, (B, T), and the library's own function of them, and returns None if
    every row is one sequence, otherwise the sequence number of each token. The library's function reads the values in
    every forward, for which the host has to wait. With FlashAttention, each layer also reads those of a single row,
    including during recomputation in a backward pass, unless ``known`` returns True, meaning that they are one
    sequence. No argument of a model disables this. Seen with transformers 5.23.
    """
    from transformers import masking_utils, modeling_flash_attention_utils

    look = masking_utils.find_packed_sequence_indices
    in_layer = modeling_flash_attention_utils._is_packed_sequence

    def layer(positions: Tensor | None, batch_size: int) -> Any:
        return False if known() else in_layer(positions, batch_size)

    with (
        mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda positions: decide(positions, look)),
        mock.patch.object(modeling_flash_attention_utils, "_is_packed_sequence", layer),
    ):
        yield


@contextlib.contextmanager
def attending_with(model: nn.Module, name: str) -> Iterator[None]:
    """Let all layers of the model attend with a function that is registered under ``name``, within this context.

    ``set_attn_implementation`` is public, but looks for kernels and sets the configurations of other parts too. A
    layer reads the name in every forward, including during recomputation in a backward pass. For a function without a
    registered function for masks, transformers creates no masks. Seen with transformers 5.23.
    """
    found: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [
        (each, each._attn_implementation) for each in found.values() if hasattr(each, "_attn_implementation_internal")
    ]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation


def replace_by_4bit(model: Any, config: Any) -> None:
    """Replace the layers of a model without weights that are quantized while it is loaded, with a BitsAndBytesConfig.

    The quantizer that does so belongs to ``from_pretrained``, which needs weights. Seen with transformers 5.23.
    """
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import get_keys_to_not_convert

    kept = [*get_keys_to_not_convert(model), *(config.llm_int8_skip_modules or ())]
    replace_with_bnb_linear(model, kept, config)


def quantized_names(model: Any, names: Iterable[str], config: Any) -> list[str]:
    """Return those of the names of linear layers that :func:`replace_by_4bit` would replace."""
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = [*get_keys_to_not_convert(model), *(config.llm_int8_skip_modules or ())]
    return [name for name in names if should_convert_module(name, kept)]


@contextlib.contextmanager
def experts_with(product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Let mixtures of experts multiply with this function, within this context.

    It gets (S, in) rows sorted by expert, (experts, in, out) weights, and where each expert's rows end. Without data,
    torch's own only supports bf16, and transformers' fallback also allocates what only trained experts need. Seen with
    torch 2.13 and transformers 5.23.
    """
    from transformers.integrations import moe

    with mock.patch.object(moe, "_grouped_mm", product):
        yield


def chosen_attention(config: PretrainedConfig) -> str | None:
    """The attention that a model was loaded with, or that was requested, by its configuration; None if neither.

    There is no public attribute, and ``to_dict`` leaves it out. Seen with transformers 5.23.
    """
    return config.get_text_config()._attn_implementation  # type: ignore[no-any-return]


def checkpoint_function(layer: nn.Module) -> Callable[..., Any] | None:
    """Return the function with which a layer checkpoints itself once that is enabled, or None if it has none.

    It is a private attribute. The code of older models on the Hub calls one of the whole model. Seen with transformers
    5.23.
    """
    return vars(layer).get("_gradient_checkpointing_func")


def set_checkpoint_function(layer: nn.Module, function: Any) -> None:
    """Replace the result of :func:`checkpoint_function`. Seen with transformers 5.23."""
    layer._gradient_checkpointing_func = function


def requested_attention(model: PreTrainedModel) -> str | None:
    """The attention that a model was loaded with by request, if it is none of the fast ones; else None.

    A model for which transformers has no SDPA is loaded with eager attention without a request. There is no public
    attribute for it. Seen with transformers 5.23.
    """
    used = chosen_attention(model.config)
    fast = used is None or used == "sdpa" or used.startswith("flash_attention")
    return None if fast or (used == "eager" and not model._supports_sdpa) else used


def limit_grouped_queries(fits: Callable[[Tensor], bool]) -> None:
    """Let SDPA share the keys and values of grouped queries, in this process, only if ``fits`` holds for the keys.

    They are otherwise expanded to a head per query. transformers decides by mask and size of the heads, in a function
    that its layers call but that no argument replaces (transformers #48633). Seen with transformers 5.23.
    """
    from transformers.integrations import sdpa_attention

    decide = inspect.unwrap(sdpa_attention.use_gqa_in_sdpa)

    @functools.wraps(decide)
    def limited(attention_mask: Tensor | None, key: Tensor, *more: Tensor) -> bool:
        return decide(attention_mask, key, *more) and fits(key)

    sdpa_attention.use_gqa_in_sdpa = limited


def load_balancing_function(model: PreTrainedModel) -> Callable[..., Any] | None:
    """The ``load_balancing_loss_func`` of the module that defines a mixture of experts; None for any other model.

    A model adds this loss to its own loss, which is not computed here, and does not expose it otherwise. Its arguments
    are the router logits of all layers, the number of experts, the number of experts per token, and the attention
    mask. Seen with transformers 5.23.
    """
    return getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)


def dropout_rates(module: nn.Module) -> list[str]:
    """The attributes in which a module stores dropout rates as plain numbers, under any name.

    Models pass such a rate to a function (``attention_dropout``, ``attn_dropout_p``, ``resid_pdrop`` …), which setting
    the dropout modules to zero does not affect; there is no public list of them. Seen with transformers 5.23.
    """
    return [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]


def asks_for_trust(error: Exception) -> bool:
    """Whether ``from_pretrained`` failed because the model contains code and ``trust_remote_code`` is off.

    It raises a plain ``ValueError``, which can be identified only by its message. Seen with transformers 5.23.
    """
    return "trust_remote_code" in str(error)


def tokenizer_options(tokenizer: Any) -> dict[str, Any]:
    """The arguments that a tokenizer was created with, as ``save_pretrained`` writes them.

    They affect the results of a tokenizer written in Python, and no public attribute contains them. Seen with
    transformers 5.23.
    """
    options: dict[str, Any] = tokenizer.init_kwargs
    return options


def callback_handler(callbacks: Sequence[Any], processing_class: Any) -> Any:
    """``Trainer``'s handler, which calls every callback of an event with model, optimizer and schedule.

    Callbacks rely on its order, its copies of classes and its keyword arguments, but it is an internal class. Seen
    with transformers 5.23.

    Args:
        callbacks: instances or classes, including ``DefaultFlowCallback``.
        processing_class: the tokenizer.
    """
    from transformers.trainer_callback import CallbackHandler

    return CallbackHandler(list(callbacks), None, processing_class, None, None)


def keeps_state(part: Any) -> bool:
    """Whether a callback or the control has a ``state()`` that belongs in ``TrainerState.stateful_callbacks``.

    ``Trainer`` checks for the base class ``ExportableState``, which is neither exported nor documented. Seen with
    transformers 5.23.
    """
    from transformers.trainer_callback import ExportableState

    return isinstance(part, ExportableState)


def tensorboard_writer(callback: Any) -> Any:
    """The ``SummaryWriter`` of a ``TensorBoardCallback``; None before training begins.

    A run has one writer per folder, so all other values must be logged through this one. Seen with transformers 5.23.
    """
    return callback.tb_writer


def logits_processors(model: GenerationMixin, config: Any) -> LogitsProcessorList:
    """The logits processors that ``model.generate`` builds for a generation config, for a one-token prompt on the CPU.

    There is no public way to find out which keys of a config have an effect, or on which processors. Seen with
    transformers 5.23.
    """
    model._prepare_special_tokens(config, device="cpu")
    return model._get_logits_processor(config, input_ids_seq_length=1, device="cpu")


@contextlib.contextmanager
def changed_processors(model: GenerationMixin, change: Callable[[LogitsProcessor], LogitsProcessor]) -> Iterator[None]:
    """Replace, within this context, every logits processor of ``model.generate`` by the result of ``change``.

    Processors can be added to transformers' own, but these cannot be wrapped in their order, which matters. Seen with
    transformers 5.23.
    """
    from transformers import LogitsProcessorList

    make = model._get_logits_processor

    def changed(*args: Any, **kwargs: Any) -> LogitsProcessorList:
        return LogitsProcessorList(change(one) for one in make(*args, **kwargs))

    model._get_logits_processor = changed
    try:
        yield
    finally:
        del model._get_logits_processor


def knows_padding(processor: LogitsProcessor) -> bool:
    """Whether a processor knows the length of each row's padding, which ``generate`` passes to some.

    Such a processor would skip as many real tokens if the padding were removed. The argument is documented, but not
    the attribute. Seen with transformers 5.23, the first release to do so.
    """
    return getattr(processor, "prompt_ignore_length", None) is not None


def is_flash_attention_requested(config: PretrainedConfig) -> bool:
    """Whether a model computes attention with a flash kernel, which has many names.

    Only such a kernel reads the paged cache of continuous batching in place. Seen with transformers 5.23.
    """
    from transformers.utils import generic

    return bool(generic.is_flash_attention_requested(config))


def attention_implementation(model: PreTrainedModel) -> Any:
    """The attention implementation of a model, such as ``sdpa``, as accepted by ``model.set_attn_implementation``.

    Continuous batching replaces it temporarily, and requires one that it supports. There is a public setter, but no
    public getter. Seen with transformers 5.23.
    """
    return model.config._attn_implementation


def supports_paged_attention(model: PreTrainedModel) -> bool:
    """Whether a model's attention can be replaced by one on a paged cache, and it has no other state.

    Continuous batching needs both and checks neither. Seen with transformers 5.23.
    """
    return bool(model._supports_attention_backend and not model._is_stateful)


def paged_cache_obstacle(config: PretrainedConfig) -> str | None:
    """Why continuous batching does not support a model's types of layers, in transformers' words; or None.

    A manager raises the same error on creation, but the decision to create one comes earlier. Seen with transformers
    5.23; releases without continuous batching lack the module.
    """
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    try:
        group_layers_by_attn_type(config)
    except ValueError as error:
        return str(error)
    return None


def works_in_continuous_batching(processor: LogitsProcessor) -> bool:
    """Whether transformers marks a processor as needing only the scores, which is all that it gets there.

    A manager drops the others with a warning, but the decision to create one comes earlier. Seen with transformers
    5.23.
    """
    return bool(getattr(processor, "supports_continuous_batching", False))


@contextlib.contextmanager
def continuous_batching_hushed() -> Iterator[None]:
    """Suppress log messages of continuous batching below ``CRITICAL`` within this context.

    It logs the traceback of an error in its thread, which would break a progress bar; callers raise the error
    themselves. The logger has its own name, outside transformers' verbosity. Seen with transformers 5.23.
    """
    log = logging.getLogger("ContinuousBatchingLogger")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def set_copies(manager: Any, count: int) -> None:
    """Prefill each request that is added from now on once, and complete it ``count`` times.

    ``num_return_sequences`` of the generation config applies to all requests of a manager; only this attribute, which
    stores it, can differ between requests. Seen with transformers 5.23.
    """
    manager.num_return_sequences = count


def request_names(name: str, count: int) -> list[str]:
    """The names of the ``count`` completions of a request in continuous batching, the request's own first.

    A request that is added once with ``num_return_sequences`` set is prefilled once and then copied; the names of the
    copies are not documented. Seen with transformers 5.23.
    """
    return [name, *(f"{name}__child#{number}" for number in range(count - 1))]


def generation_error(manager: Any) -> Exception | None:
    """The error that ended the thread of continuous batching, or None.

    ``get_result`` returns None after a timeout and after a failure, and there is no public way to distinguish them.
    Seen with transformers 5.23.
    """
    error: Exception | None = manager.background_thread_status.fatal_error
    return error
