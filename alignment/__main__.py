"""``python -m alignment COMMAND``: for launchers, as in ``torchrun --nproc_per_node 2 -m alignment train kto``."""

from __future__ import annotations

from alignment.cli.commands import main

if __name__ == "__main__":
    main(program="python -m alignment")
