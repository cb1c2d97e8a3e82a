"""Resume from checkpoints in which one piece of state is missing or stale; for ``test_resume_state.py``.

Usage: resume_tampered.py SPEC, a JSON list of runs with two points each: in checkpoints of the second, the pieces that
``only`` matches are replaced by those of the first. ``NAME.json`` next to SPEC has the detected differences by piece;
``control`` is an intact checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed.accelerator import get_accelerator
from drivers.resume_runs import disturb, left_behind, train
from resume_comparison import differences
from resume_tampering import Piece, pieces, tamper

from alignment.cli.guarded import guarded


def noticed(run: dict[str, Any], folder: Path, piece: Piece | None) -> list[str]:
    """Return the differences from the uninterrupted run after resuming without a piece, or why it cannot resume."""
    older, point = run["points"]
    whole, after = folder / "whole", folder / "after"
    left_behind(whole, after, point)
    if piece is not None:
        out = after / "out"
        tamper(piece, out / f"checkpoint-{older}", out / f"checkpoint-{point}")
    disturb(1000)
    try:
        train(run, after, f"checkpoint-{point}")
        return differences(whole, after, point)
    except Exception as error:  # any error is fine: the run does not silently continue with wrong results
        return [f"{type(error).__name__}: {error}"]
    finally:
        shutil.rmtree(after)


def main() -> None:
    """Train all runs of the file."""
    mock.patch("alignment.training.run_page.draw_page").start()
    mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True).start()
    spec = Path(sys.argv[1])
    for run in json.loads(spec.read_text()):
        folder = spec.parent / run["name"]
        train(run, folder / "whole")
        out = folder / "whole" / "out"
        older, checkpoint = (out / f"checkpoint-{point}" for point in run["points"])
        found = {"control": noticed(run, folder, None)}
        chosen = [piece for piece in pieces(older, checkpoint) if re.match(run["only"], str(piece))]
        found |= {str(piece): noticed(run, folder, piece) for piece in chosen}
        (spec.parent / f"{run['name']}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(guarded(main))
