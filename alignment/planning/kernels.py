"""Check the requested layer kernels before any weights are loaded."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from transformers.utils import is_kernels_available

from alignment.config.errors import OptionError, did_you_mean, first_line, setting
from alignment.config.fields import keywords
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import device
from alignment.internals.liger import LOSSES, kernels_by_type, left_out
from alignment.models.kernels import HUB, liger_type
from alignment.models.source import ModelSource

_CPU = "requires a GPU, but this run computes on the CPU; remove it"


def has_gpu() -> bool:
    """Whether the run computes on a device that Triton kernels support."""
    return device().type == "cuda"


def check_kernels(options: AlignmentConfig, sources: Iterable[ModelSource | None]) -> list[str]:
    """Check that the requested kernels are available for these models.

    Args:
        options: options of the run.
        sources: the models that are loaded with these options; None is skipped.

    Returns:
        Lines to print at the start of the run.

    Raises:
        OptionError: there is no GPU, the library is missing, or there is no such kernel for a model.
    """
    given = [source for source in sources if source is not None]
    for source in given:
        if source.init_kwargs.get("kernel_config") is not None:
            raise OptionError("model_init_kwargs: kernel_config is not supported; remove it and set use_kernels: true")
    hub = [source for source in given if source.init_kwargs.get(HUB)]
    _check_hub(options, hub)
    if not options.use_liger_kernel:
        if options.liger_kernel_config is not None:
            raise OptionError(
                f"{setting('liger_kernel_config', options.liger_kernel_config)}: has no effect without "
                "use_liger_kernel; set use_liger_kernel: true, or remove it"
            )
    else:
        _check_liger(options, given)
    if options.use_liger_loss:
        return ["use_liger_loss has no effect: log-probs are always computed by a fused head"]
    return []


def _check_hub(options: AlignmentConfig, sources: list[ModelSource]) -> None:
    if not sources:
        return
    named = "model_init_kwargs: use_kernels=True"
    if not has_gpu():
        raise OptionError(f"{named}: {_CPU}")
    if not is_kernels_available():
        raise OptionError(
            f"{named}: requires a version of the package kernels that transformers supports; install it, or remove "
            "use_kernels"
        )
    if options.use_liger_kernel:
        raise OptionError(f"{named} and use_liger_kernel replace the same layers; remove one of them")


def _check_liger(options: AlignmentConfig, sources: list[ModelSource]) -> None:
    named = "use_liger_kernel=True"
    if not has_gpu():
        raise OptionError(f"{named}: {_CPU}")
    if find_spec("liger_kernel") is None:
        raise OptionError(f'{named}: liger-kernel is not installed; run pip install "deepspeed-alignment[liger]"')
    try:
        known = kernels_by_type()
    except ImportError as error:
        raise OptionError(f"{named}: cannot import liger-kernel: {first_line(error)}; remove it") from error
    for source in sources:
        name = liger_type(source.config)
        if name is None:
            raise OptionError(
                f"{named}: the installed Liger has no kernels for {source.name}, a {source.config.model_type} model; "
                f"remove it. Supported model types: {', '.join(sorted(known))}"
            )
        _check_names(options, name, known[name])


def _check_names(options: AlignmentConfig, model_type: str, names: frozenset[str]) -> None:
    for key, value in keywords(options.liger_kernel_config).items():
        text = f"liger_kernel_config: {setting(key, value)}"
        if key in LOSSES and value:
            raise OptionError(f"{text}: Liger's losses are not used, as log-probs have their own head; remove it")
        if key not in names:
            near = did_you_mean(key, names) or f"; expected one of {', '.join(sorted(names - {*LOSSES}))}"
            raise OptionError(f"{text}: Liger has no such kernel for a {model_type} model{near}")
        if not isinstance(value, bool):
            raise OptionError(f"{text}: must be true or false")
        if value and key in left_out(model_type):
            raise OptionError(f"{text}: Liger's kernel does not support {model_type} models; remove it")
