"""Lines for the user on the terminal."""

from __future__ import annotations

from alignment.run.ranks import rank


def tell(text: str | None) -> None:
    """Print a line on the first rank; do nothing for None."""
    if text is not None and rank() == 0:
        print(text, flush=True)
