"""The name of a tokenised dataset: a hash of everything that its content depends on.

The rows' content is hashed rather than the dataset's fingerprint: two processes that load the same file get the same
name, and a file that was changed gets a new one, whatever its time stamp says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa
from datasets import Dataset

from alignment.data.columns import COLUMNS, MAPPED_COLUMNS
from alignment.data.formats import Kind
from alignment.data.truncation import Limits
from alignment.internals.transformers import tokenizer_options

FORMAT_VERSION = 3  # raise it when the same input would be tokenised or stored in another way
_ROWS = 1000  # rows hashed at a time; part of the hash


def cache_name(dataset: Dataset, kind: Kind, tokenizer: Any, limits: Limits, extra: Sequence[str] = ()) -> str:
    """A folder name such as ``paired-3f…`` for these rows, this tokenizer, these limits and ``extra`` columns."""
    digest = hashlib.blake2b(digest_size=16)
    settings: dict[str, Any] = {"version": FORMAT_VERSION, "kind": kind, "limits": asdict(limits)}
    settings |= {"tokenizer": _describe(tokenizer)} | ({"extra": list(extra)} if extra else {})
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    columns = [name for name in dict.fromkeys([*COLUMNS, *MAPPED_COLUMNS, *extra]) if name in dataset.column_names]
    arrow = dataset.select_columns(columns).with_format("arrow")
    for start in range(0, len(arrow), _ROWS):
        digest.update(_table_bytes(arrow[start : start + _ROWS]))
    return f"{kind}-{digest.hexdigest()}"


def _table_bytes(table: pa.Table) -> memoryview:
    table = table.combine_chunks().replace_schema_metadata(None)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def _describe(tokenizer: Any) -> dict[str, Any]:
    """What decides how a tokenizer turns text into ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        for setting in ("truncation", "padding"):  # changed by every call of the tokenizer, and not used here
            content.pop(setting, None)
    else:
        content = {"vocab": sorted(tokenizer.get_vocab().items()), "options": tokenizer_options(tokenizer)}
    return {
        "class": type(tokenizer).__name__,
        "content": hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest(),
        "template": tokenizer.chat_template,
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, *sorted(tokenizer.all_special_ids)],
        "whole": list(tokenizer("a 1")["input_ids"]),
    }
