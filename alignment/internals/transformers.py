"""transformers: its DeepSpeed flag, models and tokenizers, callbacks, logits processors, and continuous batching.

From :func:`is_flash_attention_requested` on it is about continuous batching, which changes from release to release.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PretrainedConfig, PreTrainedModel


@contextlib.contextmanager
def loading(ds_config: dict[str, Any] | None) -> Iterator[None]:
    """Within this context ``from_pretrained`` follows ``ds_config``, and only it.

    transformers keeps its DeepSpeed configuration in one process-wide weak reference: alive at stage 3, it partitions
    any model that is loaded and makes every ``generate`` synchronise. So it lives for one load, and whatever was there
    before comes back. ``HfDeepSpeedConfig`` sets the reference, and nothing public reads or restores it (transformers
    #28106 asks for a way to load one model without it). Seen with transformers 5.23.
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
    """Names of the parameters that are not in layers of these types, and match none of the patterns in lower case.

    ``Trainer`` finds by this function what decays, so that the same parameters do here. transformers does not export
    it. Seen with transformers 5.23.
    """
    from transformers.trainer_pt_utils import get_parameter_names

    return list(get_parameter_names(model, list(layers), list(patterns)))


@contextlib.contextmanager
def deciding_on_packing(
    decide: Callable[[Tensor, Callable[[Tensor], Tensor | None]], Tensor | None], known: Callable[[], bool]
) -> Iterator[None]:
    """Within this context ``decide`` says whether rows without an attention mask are packed sequences.

    It is given the positions that the model made, (B, T), and the library's own function of them: None where every row
    is one sequence, else the number of the sequence that each token is of. That function looks at the values, in every
    forward, and the host waits for them. With FlashAttention each layer looks at those of a single row once more, also
    as it is computed again in a backward pass, unless ``known`` says that they are one sequence. No argument of a
    model says that nobody need look. Seen with transformers 5.23.
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


def load_balancing_function(model: PreTrainedModel) -> Callable[..., Any] | None:
    """The ``load_balancing_loss_func`` of the file that defines a mixture of experts; None for any other model.

    A model adds the loss to its own, which is not computed here, and offers it in no other way. Its arguments are the
    router logits of all layers, the number of experts, how many a token goes to, and the attention mask. Seen with
    transformers 5.23.
    """
    return getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)


def dropout_rates(module: nn.Module) -> list[str]:
    """The attributes in which a module keeps dropout rates as plain numbers, by whatever name.

    Models pass such a rate to a function (``attention_dropout``, ``attn_dropout_p``, ``resid_pdrop`` …), where setting
    the dropout modules to zero does not reach it; nothing public lists them. Seen with transformers 5.23.
    """
    return [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]


def asks_for_trust(error: Exception) -> bool:
    """Whether ``from_pretrained`` failed because the model comes with code and ``trust_remote_code`` is off.

    It raises a plain ``ValueError``, so the message has to tell. Seen with transformers 5.23.
    """
    return "trust_remote_code" in str(error)


def tokenizer_options(tokenizer: Any) -> dict[str, Any]:
    """The arguments that a tokenizer was made with, as ``save_pretrained`` writes them.

    They decide what a tokenizer written in Python makes of a text, and no public attribute holds them. Seen with
    transformers 5.23.
    """
    options: dict[str, Any] = tokenizer.init_kwargs
    return options


def parallel_mode(name: str) -> Any:
    """The member of ``ParallelMode`` that ``TrainingArguments.parallel_mode`` returns.

    Callbacks compare it by identity. The property is documented, the class is not exported. Seen with transformers
    5.23.

    Args:
        name: ``NOT_PARALLEL``, ``NOT_DISTRIBUTED`` or ``DISTRIBUTED``.
    """
    from transformers.training_args import ParallelMode

    return ParallelMode[name]


def callback_handler(callbacks: Sequence[Any], processing_class: Any) -> Any:
    """``Trainer``'s handler, which calls every callback of an event with model, optimizer and schedule.

    Callbacks rely on its order, its copies of classes and its keyword arguments, and it is an internal class. Seen
    with transformers 5.23.

    Args:
        callbacks: instances or classes, ``DefaultFlowCallback`` among them.
        processing_class: the tokenizer.
    """
    from transformers.trainer_callback import CallbackHandler

    return CallbackHandler(list(callbacks), None, processing_class, None, None)


def keeps_state(part: Any) -> bool:
    """Whether a callback or the control has a ``state()`` that belongs in ``TrainerState.stateful_callbacks``.

    ``Trainer`` asks for the base class ``ExportableState``, which is neither exported nor documented. Seen with
    transformers 5.23.
    """
    from transformers.trainer_callback import ExportableState

    return isinstance(part, ExportableState)


def tensorboard_writer(callback: Any) -> Any:
    """The ``SummaryWriter`` of a ``TensorBoardCallback``; None before training begins.

    A run has one writer per folder, so whatever else is logged has to go through this one. Seen with transformers
    5.23.
    """
    return callback.tb_writer


def logits_processors(model: GenerationMixin, config: Any) -> LogitsProcessorList:
    """What ``model.generate`` makes of a generation config: the processors of a prompt of one token, on the CPU.

    Nothing public tells which keys of a config have an effect, or with which processors. Seen with transformers 5.23.
    """
    model._prepare_special_tokens(config, device="cpu")
    return model._get_logits_processor(config, input_ids_seq_length=1, device="cpu")


@contextlib.contextmanager
def changed_processors(model: GenerationMixin, change: Callable[[LogitsProcessor], LogitsProcessor]) -> Iterator[None]:
    """Within this context every logits processor that ``model.generate`` makes is replaced by what ``change`` returns.

    transformers lets one add processors, not wrap its own in their order, on which the result depends. Seen with
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
    """Whether a processor has been told how long the padding of each row is, as ``generate`` does for some.

    One that has been needs no help, and would take away as many real tokens if the padding were removed. The argument
    is documented, the attribute is not. Seen with transformers 5.23, the first release to do so.
    """
    return getattr(processor, "prompt_ignore_length", None) is not None


def is_flash_attention_requested(config: PretrainedConfig) -> bool:
    """Whether a model computes its attention by a flash kernel, of which there are many names.

    Only such a kernel reads the paged cache of continuous batching in place. Seen with transformers 5.23.
    """
    from transformers.utils import generic

    return bool(generic.is_flash_attention_requested(config))


def attention_implementation(model: PreTrainedModel) -> Any:
    """The attention that a model computes with, such as ``sdpa``, as ``model.set_attn_implementation`` takes it.

    Continuous batching sets another one while it lasts, and has to find one that it can use in the first place. There
    is a public setter, and no public getter. Seen with transformers 5.23.
    """
    return model.config._attn_implementation


def supports_paged_attention(model: PreTrainedModel) -> bool:
    """Whether a model lets its attention be replaced by one on a paged cache, and keeps no other state.

    Continuous batching needs both and checks neither. Seen with transformers 5.23.
    """
    return bool(model._supports_attention_backend and not model._is_stateful)


def paged_cache_obstacle(config: PretrainedConfig) -> str | None:
    """Why continuous batching cannot make a cache for a model's kinds of layers, in transformers' words; or None.

    A manager raises the same when it is made; whether to make one has to be decided before. Seen with transformers
    5.23; releases without continuous batching lack the module.
    """
    from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

    try:
        group_layers_by_attn_type(config)
    except ValueError as error:
        return str(error)
    return None


def works_in_continuous_batching(processor: LogitsProcessor) -> bool:
    """Whether transformers marks a processor as content with the scores alone, which are all that it is given there.

    A manager drops the others with a warning; whether to make one has to be decided before. Seen with transformers
    5.23.
    """
    return bool(getattr(processor, "supports_continuous_batching", False))


@contextlib.contextmanager
def continuous_batching_hushed() -> Iterator[None]:
    """Within this context continuous batching logs nothing below ``CRITICAL``.

    It logs the traceback of whatever ends its thread, which would break a progress bar; callers raise it themselves.
    The logger has a name of its own, outside transformers' verbosity. Seen with transformers 5.23.
    """
    log = logging.getLogger("ContinuousBatchingLogger")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def set_copies(manager: Any, count: int) -> None:
    """Let each request that is added from now on be prefilled once and completed ``count`` times.

    ``num_return_sequences`` of the generation config does so for all requests of a manager alike; only this attribute,
    which holds it, can differ from request to request. Seen with transformers 5.23.
    """
    manager.num_return_sequences = count


def request_names(name: str, count: int) -> list[str]:
    """The names under which continuous batching returns ``count`` completions of a request, the request's own first.

    A request that is added once with ``num_return_sequences`` set is prefilled once and then copied; the names of the
    copies are documented nowhere. Seen with transformers 5.23.
    """
    return [name, *(f"{name}__child#{number}" for number in range(count - 1))]


def generation_error(manager: Any) -> Exception | None:
    """What ended the generating thread of continuous batching, or None.

    ``get_result`` returns None after a timeout and after a failure alike, and nothing public tells which it was. Seen
    with transformers 5.23.
    """
    error: Exception | None = manager.background_thread_status.fatal_error
    return error
