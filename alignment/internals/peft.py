"""PEFT: selecting the active and the trained adapter of a model, and the ``PeftModel`` around its adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn
    from transformers import PreTrainedModel


@contextlib.contextmanager
def computing_with(model: nn.Module, adapter: str | None) -> Iterator[None]:
    """Activate one adapter in every layer of ``model`` within this context, or with None disable all adapters.

    PEFT's own functions also change which parameters require gradients, and transformers' ``enable_adapters`` skips
    the fully trained modules (``modules_to_save``), which would stay disabled. Neither offers a context manager. Here
    no parameter is changed, and the previous state is restored on any exit. Seen with peft 0.21.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    before = []
    try:
        for module in model.modules():
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                before.append((module, module._disable_adapters, module._active_adapter))
                module._disable_adapters = adapter is None
                if adapter is not None:
                    module._active_adapter = [adapter]
        yield
    finally:
        for module, disabled, active in before:
            module._disable_adapters, module._active_adapter = disabled, active


def train_adapter(model: nn.Module, name: str) -> None:
    """Activate one adapter in every layer of ``model``, and make it the only one that requires gradients.

    ``PeftModel.set_adapter`` does this for a ``PeftModel``, and transformers' method of that name only for adapters
    that it loaded itself; ours are inside the transformers model in either case. The class of fully trained modules is
    not exported. Seen with peft 0.21.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for module in model.modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            module.set_adapter([name])


def as_peft_model(model: PreTrainedModel, name: str) -> PeftModel:
    """A ``PeftModel`` around a transformers model with injected adapters: the same modules under PEFT's names.

    ``inject_adapter_in_model`` and transformers' ``add_adapter`` do not return one, and the constructors of
    ``PeftModel`` and of its tuners would inject the adapters again, so their attributes are set here. The tables that
    map adapter types and task types to classes are not exported either. Seen with peft 0.21.

    Args:
        model: the model; it, its adapters and its gradient flags are not changed.
        name: name of the active adapter.
    """
    from peft import PeftModel
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.mapping_func import MODEL_TYPE_TO_PEFT_MODEL_MAPPING
    from torch import nn

    configs: Any = model.peft_config
    kind = PEFT_TYPE_TO_TUNER_MAPPING[configs[name].peft_type]
    tuner = kind.__new__(kind)
    nn.Module.__init__(tuner)
    tuner.model, tuner.peft_config, tuner.active_adapter = model, configs, name
    tuner.targeted_module_names, tuner.targeted_parameter_names = [], []
    around = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(configs[name].task_type, PeftModel)
    view: Any = around.__new__(around)
    nn.Module.__init__(view)
    view._is_prompt_learning, view._peft_config, view._adapters_disabled = False, None, False
    view.base_model, view.active_adapter, view.peft_type = tuner, name, configs[name].peft_type
    view.special_peft_forward_args = {"adapter_names", "alora_offsets"}
    if hasattr(model, "prepare_inputs_for_generation"):
        view.base_model_prepare_inputs_for_generation = model.prepare_inputs_for_generation
    view.train(model.training)
    found: PeftModel = view
    return found
