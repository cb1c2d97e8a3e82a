"""One faulty command of ``test_bad_input``."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

CHAT = {
    "prompt": [{"role": "user", "content": "hi"}],
    "completion": [{"role": "assistant", "content": "oh"}],
    "label": True,
}


@dataclass(frozen=True)
class Case:
    """One faulty command.

    ``says`` must all stand in the error's line; there and in options, ``@name`` is a path in the test's own folder. In
    options, ``%name`` is a model's path.
    ``model`` is one of :func:`write_models`; ``data`` are the rows or the text of ``@data.jsonl``; ``files`` are more
    such files. An option of None is left out.
    """

    name: str
    says: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    data: list[dict[str, Any]] | str | None = None
    model: str = "good"
    method: str = "kto"
    files: dict[str, str] = field(default_factory=dict)


def deepspeed_case(
    name: str, content: dict[str, Any], *says: str, key: str = "deepspeed", method: str = "kto", **options: Any
) -> Case:
    """A fault in a DeepSpeed JSON."""
    files = {f"{key}.json": json.dumps(content)}
    return Case(name, says, {key: f"@{key}.json", **options}, method=method, files=files)
