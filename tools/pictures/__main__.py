"""Command line of :mod:`tools.pictures`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.pictures.drawing import THEMES, draw
from tools.pictures.recording import DEMO, PICTURES, load, record_demo, save
from tools.pictures.scenes import SCENES


def main(arguments: list[str] | None = None) -> None:
    """Record the demo if requested, then draw every picture in every theme."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures", description="Draw the documentation's pictures.")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="output folder of `make demo` to record first")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder to write to (default: docs/pictures)")
    options = parser.parse_args(arguments)
    if options.record is not None:
        save(DEMO, record_demo(options.record))
    options.out.mkdir(parents=True, exist_ok=True)
    for name, scene in SCENES.items():
        for theme in THEMES:
            draw(options.out / f"{name}-{theme}.svg", scene, load(scene.data), theme)


if __name__ == "__main__":
    main()
