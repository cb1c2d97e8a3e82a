"""Mutants that no test can detect, by file and change, from ``tests/mutations/equivalent.yaml``."""

from __future__ import annotations

import yaml

from tools.ranks.client import ROOT

EQUIVALENT = ROOT / "tests" / "mutations" / "equivalent.yaml"


def equivalents() -> dict[tuple[str, str, str], str]:
    """Return equivalent mutants and the reasons why no test can detect them."""
    listed: list[dict[str, str]] = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or []
    return {(entry["file"], entry["old"], entry["new"]): entry["why"] for entry in listed}
