"""The output folder of an export: checked first, filled under a hidden name, and published when complete."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from alignment.checkpoint.exporting.check import Samples, dataset_samples, default_samples
from alignment.checkpoint.saving import move_into, no_progress_bar, share_with_others
from alignment.config.errors import ModelError, OptionError, OutputError, first_line, setting

REPORT, CARD = "export_report.json", "README.md"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Tell = Callable[[str], None]
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def check_options(dtype: str, sample_count: int, max_shard_size: str, out: Path) -> int:
    """Validate the options before anything is read; return the maximum size of a weight file in bytes.

    Raises:
        OptionError: ``dtype``, ``sample_count`` or ``max_shard_size`` is invalid.
        OutputError: ``out`` is not empty or cannot be written.
    """
    if dtype not in ("auto", *DTYPES):
        raise OptionError(f"{setting('dtype', dtype)}: expected one of auto, {', '.join(DTYPES)}")
    if sample_count < 0:
        raise OptionError(f"{setting('samples', sample_count)}: expected 0 or more")
    size = _bytes(max_shard_size)
    _check_out(out)
    return size


def _bytes(size: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]B)", size.strip().upper())
    count = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if count < 1:
        raise OptionError(f"{setting('max_shard_size', size)}: expected a size such as 5GB or 500MB")
    return count


def _check_out(out: Path) -> None:
    """Reject a folder that is not empty or cannot be written."""
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file; pass a folder that does not exist yet")
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(f"{out} is not empty; pass a folder that does not exist yet, or empty this one")
    parent = next(one for one in (out.absolute(), *out.absolute().parents) if one.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{out} cannot be written: no write permission in {parent}")


@contextlib.contextmanager
def written(out: Path) -> Iterator[Path]:
    """A hidden folder that replaces ``out`` when the context ends without an error.

    If ``out`` exists, the hidden folder is inside it: ``out`` may be a mount point, and a move is a rename only there.

    Raises:
        OutputError: the folder cannot be written.
    """
    name = f".{out.absolute().name}.{uuid.uuid4().hex[:8]}.partial"
    partial = out / name if out.exists() else out.absolute().parent / name
    try:
        partial.mkdir(parents=True)
        yield partial
        move_into(partial, out)
    except OSError as error:
        raise OutputError(f"{out} could not be written: {error.strerror or first_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save(model: PreTrainedModel, tokenizer: Any, folder: Path, shard_bytes: int) -> None:
    """Write model, generation configuration and tokenizer.

    Raises:
        OutputError: they are inconsistent, or cannot be written.
    """
    try:
        model.save_pretrained(folder, max_shard_size=shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except (ValueError, SafetensorError) as error:  # such as an inconsistent generation configuration
        raise OutputError(f"the model cannot be written: {first_line(error)}") from error
    share_with_others(folder)


def load_tokenizer(where: str, revision: str | None, trust_remote_code: bool, *, needed: bool) -> Any:
    """Load the tokenizer of a folder or Hub name; return None if it has none and none is ``needed``.

    Raises:
        ModelError: the tokenizer cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # each library has its own error classes for a broken file
        if needed or (Path(where) / "tokenizer_config.json").is_file():
            raise ModelError(f"{where}: the tokenizer cannot be loaded: {first_line(error)}") from error
        return None


def sample_rows(given: Samples | str | None, count: int, tokenizer: Any, config: PretrainedConfig) -> Samples | None:
    """The rows to compare outputs on; None if ``count`` is 0 and no rows are passed.

    Raises:
        OptionError: a dataset needs a tokenizer, but there is none.
        DataError: the dataset cannot be used.
    """
    if isinstance(given, Samples) or count == 0:
        return given if isinstance(given, Samples) else None
    vocabulary = config.get_text_config().vocab_size
    if given is None:
        return default_samples(tokenizer, vocabulary, count)
    if tokenizer is None:
        raise OptionError(f"{setting('dataset_name', given)}: there is no tokenizer to encode it; remove the option")
    return dataset_samples(given, tokenizer, vocabulary, count)


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the libraries' progress bars and warnings about loading, dequantizing and untying."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with no_progress_bar(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
