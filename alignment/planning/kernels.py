"""Layer kernels as they are asked for: what cannot be had is refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from transformers.utils import is_kernels_available

from alignment.config.errors import OptionError, did_you_mean, first_line, setting
from alignment.config.options import AlignmentConfig
from alignment.engines.collectives import device
from alignment.internals.liger import LOSSES, kernels_by_type, left_out
from alignment.models.kernels import HUB, liger_type
from alignment.models.source import ModelSource

_CPU = "its kernels run on a GPU, and this run computes on the CPU; leave it out"


def has_gpu() -> bool:
    """Whether the run computes where Triton's kernels run."""
    return device().type == "cuda"


def check_kernels(options: AlignmentConfig, sources: Iterable[ModelSource | None]) -> list[str]:
    """Whether the kernels that are asked for can be put into these models.

    Args:
        options: the run's.
        sources: the models that are loaded with these options; None is skipped.

    Returns:
        Lines to tell at the start of the run.

    Raises:
        OptionError: there is no GPU, no library, or no kernel for a type or of a name.
    """
    given = [source for source in sources if source is not None]
    for source in given:
        if source.init_kwargs.get("kernel_config") is not None:
            raise OptionError("model_init_kwargs: kernel_config is not supported; set use_kernels: true alone")
    hub = [source for source in given if source.init_kwargs.get(HUB)]
    _check_hub(options, hub)
    if not options.use_liger_kernel:
        if options.liger_kernel_config is not None:
            raise OptionError(
                f"{setting('liger_kernel_config', options.liger_kernel_config)}: has no effect without "
                "use_liger_kernel; set use_liger_kernel: true, or leave it out"
            )
    else:
        _check_liger(options, given)
    if options.use_liger_loss:
        return ["use_liger_loss: log-probs come from a fused head in any case, so this changes nothing"]
    return []


def _check_hub(options: AlignmentConfig, sources: list[ModelSource]) -> None:
    if not sources:
        return
    named = "model_init_kwargs: use_kernels=True"
    if not has_gpu():
        raise OptionError(f"{named}: {_CPU}")
    if not is_kernels_available():
        raise OptionError(
            f"{named}: needs a version of the package kernels that transformers works with; leave it out"
        )
    if options.use_liger_kernel:
        raise OptionError(f"{named}: replaces the same layers as use_liger_kernel; leave one of them out")


def _check_liger(options: AlignmentConfig, sources: list[ModelSource]) -> None:
    named = "use_liger_kernel=True"
    if not has_gpu():
        raise OptionError(f"{named}: {_CPU}")
    if find_spec("liger_kernel") is None:
        raise OptionError(f'{named}: liger-kernel is not installed; run pip install "deepspeed-alignment[liger]"')
    try:
        known = kernels_by_type()
    except ImportError as error:
        raise OptionError(f"{named}: liger-kernel cannot be imported: {first_line(error)}; leave it out") from error
    for source in sources:
        name = liger_type(source.config)
        if name is None:
            raise OptionError(
                f"{named}: the installed Liger has no kernels for {source.name}, a {source.config.model_type} model; "
                f"leave it out. It has kernels for {', '.join(sorted(known))}"
            )
        _check_names(options, name, known[name])


def _check_names(options: AlignmentConfig, model_type: str, names: frozenset[str]) -> None:
    for key, value in (options.liger_kernel_config or {}).items():
        text = f"liger_kernel_config: {setting(key, value)}"
        if key in LOSSES and value:
            raise OptionError(f"{text}: log-probs come from a head of this project's own; leave it out")
        if key not in names:
            near = did_you_mean(key, names) or f"; set some of {', '.join(sorted(names - {*LOSSES}))}"
            raise OptionError(f"{text}: Liger has no such kernel for a {model_type} model{near}")
        if not isinstance(value, bool):
            raise OptionError(f"{text}: must be true or false")
        if value and key in left_out(model_type):
            raise OptionError(f"{text}: Liger's kernel does not fit a {model_type} model; leave it out")
