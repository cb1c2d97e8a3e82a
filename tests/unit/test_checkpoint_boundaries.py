"""Checkpoints and their folder in small tables: who owns it, who sees it, and which rank reads which file."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alignment.checkpoint.manifest import FileRecord, Manifest


@given(sizes=st.lists(st.integers(0, 20), max_size=9), ranks=st.integers(1, 4))
def test_every_file_is_read_by_one_rank_and_the_loads_are_balanced(sizes: list[int], ranks: int) -> None:
    files = {f"file-{number}": FileRecord(size, "") for number, size in enumerate(sizes)}
    shares = Manifest("r", 1, "kto", 1, 0, 8, 9, True, {}, {}, {}, files).shares(ranks)
    assert len(shares) == ranks and sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(files[name].size for name in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)
