"""Helpers for export tests: the command, refusals, and manually computed log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from alignment.checkpoint.export import export
from alignment.cli.commands import main
from alignment.config.errors import AlignmentError
from alignment.config.options_export import ExportOptions


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as leaving:
        main(["export", *argv], program="da")
    return leaving.value.code, *capsys.readouterr()


def refused(error: type[AlignmentError], text: str, source: Path, out: Path, **more: Any) -> None:
    """An export to a new folder is refused in one line that contains ``text``, and leaves nothing."""
    with pytest.raises(error) as caught:
        export(source, out, ExportOptions(**more))
    assert text in str(caught.value) and "\n" not in str(caught.value)
    assert not out.exists() and not list(out.parent.glob(".*"))


@torch.no_grad()
def mean_logp(model: Any, row: list[int]) -> float:
    ids = torch.tensor([row])
    table = model.eval()(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
    return float(table[torch.arange(len(row) - 1), ids[0, 1:]].mean())


def gap(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other)) / len(one)
