"""PEFT: which of a model's adapters it computes with, apart from which of them are trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextlib.contextmanager
def computing_with(model: nn.Module, adapter: str | None) -> Iterator[None]:
    """Within this context every layer of ``model`` computes with one adapter, or with None as if there were none.

    PEFT's own switches also change which parameters require a gradient, and transformers' ``enable_adapters`` forgets
    the modules that are trained whole (``modules_to_save``): they would stay switched off. Neither has a context.
    Here no parameter is touched, and what was computed with before comes back on any exit. Seen with peft 0.21.
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
    """Let every layer of ``model`` compute with one adapter, and this one alone require gradients.

    ``PeftModel.set_adapter`` does so for a ``PeftModel``, and transformers' method of that name only for adapters that
    it loaded itself; ours are in the transformers model inside either. The class of the modules that are trained whole
    is not exported. Seen with peft 0.21.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for module in model.modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            module.set_adapter([name])
