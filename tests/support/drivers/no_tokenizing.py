"""The command ``train`` where no row can be tokenized: it finds all of them in the cache, or fails."""

from __future__ import annotations

from typing import Any
from unittest import mock

from alignment.cli.train import main
from alignment.data.prepare import RowMapper


def refuse(self: RowMapper, *batch: Any) -> None:
    """Replaces the function of ``Dataset.map``."""
    raise RuntimeError("a row was tokenized")


if __name__ == "__main__":
    with mock.patch.object(RowMapper, "__call__", refuse):
        main()
