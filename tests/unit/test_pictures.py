"""The pictures of the documentation are those of the recorded data, and so are the tables of the README."""

import re
from pathlib import Path

import matplotlib
import pytest

from tools.pictures import PICTURES, RUNS, load, main

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PINNED = re.search(r"^matplotlib==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


@pytest.mark.skipif(matplotlib.__version__ != PINNED, reason=f"the pictures were drawn by matplotlib {PINNED}")
def test_the_pictures_are_drawn_from_the_recorded_data(tmp_path: Path) -> None:
    main(["--out", str(tmp_path)])
    drawn = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    assert len(drawn) == 6
    assert drawn == {path.name: path.read_bytes() for path in PICTURES.glob("*.svg")}, "run python -m tools.pictures"


def test_the_comparison_in_the_readme_is_the_recorded_one() -> None:
    rows = {(row["method"], row["training"]): row for row in load("beside_trl.json")["rows"]}
    for method in ("KTO", "CPO", "Online DPO", "Online DPO, KV cache on both sides"):
        title = "Online DPO, TRL's defaults" if method == "Online DPO" else method
        cells = [
            f"{rows[method, training]['times_faster']:.1f}× | {rows[method, training]['memory_share']:.0%}"
            for training in ("full", "LoRA")
        ]
        assert f"| {title} | {' | '.join(cells)} |" in README


def test_the_demo_in_the_readme_is_the_recorded_one() -> None:
    models = load("demo.json")["models"]
    assert len(models) == len(RUNS) + 1
    for title, row in models.items():
        name = title.replace("before", "before alignment").removeprefix("after ").replace(", LoRA", " with LoRA")
        assert f"| {name} | {row['preferred']:.3f} | {row['correct']:.3f} | {row['reward']:.2f} |" in README
