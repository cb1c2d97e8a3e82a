"""Prepared datasets of a few rows, for the tests of ``alignment.data``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset

from alignment.data.prepare import Prepared, load_prepared, prepare
from alignment.data.sources import dataset_from_python
from alignment.data.tokenization import Limits
from support.data_tokenizers import char_tokenizer


def prepared(
    rows: Any, kind: Any, folder: Path, tokenizer: Any = None, limits: Limits | None = None, **options: Any
) -> Prepared:
    """Prepare a dataset or a list of rows, and load what was stored."""
    data = rows if isinstance(rows, Dataset) else dataset_from_python(rows)
    given = kind, tokenizer or char_tokenizer(), limits or Limits(), "data", folder
    return load_prepared(prepare(data, *given, progress=False, **options))
