"""transformers: how it stores, loads and multiplies the experts of a mixture of experts."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

# (rows sorted by expert, weights, where the rows of each expert end, whether the weights are (experts, in, out))
Product = Callable[["Tensor", "Tensor", "Tensor", bool], "Tensor"]


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose class was decorated with ``use_experts_implementation``, by name.

    The decorator has no registry of its classes; the attributes that it gives to their instances are not documented.
    Seen with transformers 5.23.
    """
    given = {"is_transposed", "has_bias", "has_gate", "is_concatenated"}
    return {name: module for name, module in model.named_modules() if given <= vars(module).keys()}


def register_experts(name: str, is_packed: Callable[[Tensor], bool], product: Product) -> None:
    """Register an implementation of experts that multiplies packed weights with ``product``, and others as usual.

    Sorting, gating and weighting are those of transformers' ``grouped_mm``: its function is executed with another
    global function, which it calls once per projection. No argument replaces that, and a copy would miss whatever is
    added to the interface. Seen with transformers 5.23.
    """
    from transformers.integrations import moe

    def linear(
        input: Tensor, weight: Tensor, offs: Tensor, bias: Tensor | None = None, is_transposed: bool = False
    ) -> Tensor:
        if not is_packed(weight):
            return moe._grouped_linear(input, weight, offs, bias=bias, is_transposed=is_transposed)
        output = product(input, weight, offs, is_transposed)
        return output if bias is None else output.add_(bias)

    own = moe.grouped_mm_experts_forward
    moe.ExpertsInterface.register(
        name, types.FunctionType(own.__code__, {**vars(moe), "_grouped_linear": linear}, name, own.__defaults__)
    )


def grouped_product(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """(S, in), (experts, in, out), (experts,) -> (S, out): rows sorted by expert, and where those of each expert end.

    torch's own has conditions on devices, dtypes and versions, for which transformers has another implementation. Seen
    with transformers 5.23.
    """
    from transformers.integrations import moe

    output: Tensor = moe._grouped_mm(rows, weight, offs)
    return output


@contextlib.contextmanager
def converting_by_file(model: PreTrainedModel) -> Iterator[None]:
    """Let ``save_pretrained`` convert the weights of one file at a time, within this context.

    Most checkpoints have a tensor per expert. The experts of all layers are otherwise taken apart before the first
    file is written, which copies two thirds of them. It converts by file if ``hf_device_map`` names a CPU, for models
    that are not in memory as a whole. Seen with transformers 5.23.
    """
    with mock.patch.object(model, "hf_device_map", {"": "cpu"}, create=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Attempting to save a model with offloaded modules")
        yield


@contextlib.contextmanager
def packing_while_loading(
    found: Callable[[PreTrainedModel, Any], Collection[str]], pack: Callable[[Tensor, Any], nn.Parameter]
) -> Iterator[None]:
    """Let ``from_pretrained`` with 4-bit weights also pack the parameters ``found`` in a model, within this context.

    Each is packed as soon as it has been assembled from the checkpoint's tensors, before the next one is read. Classes
    can be registered for methods of quantization, but not replaced. Seen with transformers 5.23.

    Args:
        found: returns the names of parameters of the model without weights. Its second argument is the configuration.
        pack: packs the weights of one parameter, with the same second argument.
    """
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.quantizers import auto
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    class Quantize(Bnb4bitQuantize):  # type: ignore[misc]
        def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            own = {name: input_dict.pop(name) for name in [*input_dict] if name in self.hf_quantizer.packed}
            config = self.hf_quantizer.quantization_config
            packed = {name: pack(one[0] if isinstance(one, list) else one, config) for name, one in own.items()}
            return packed | super().convert(input_dict, **kwargs)

    class Quantizer(Bnb4BitHfQuantizer):  # type: ignore[misc]
        packed: Collection[str] = ()

        def _process_model_before_weight_loading(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
            self.packed = frozenset(found(model, self.quantization_config))
            super()._process_model_before_weight_loading(model, *args, **kwargs)

        def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
            return param_name in self.packed or super().param_needs_quantization(model, param_name, **kwargs)

        def get_quantize_ops(self) -> Quantize:
            return Quantize(self)

    with mock.patch.dict(auto.AUTO_QUANTIZER_MAPPING, {"bitsandbytes_4bit": Quantizer}):
        yield
