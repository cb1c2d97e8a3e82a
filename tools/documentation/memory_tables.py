"""``python -m tools.documentation.memory_tables`` writes the tables of what fits on a GPU, from the memory plan.

A table is between ``<!-- what fits: NAME -->`` and ``<!-- end -->`` in the README or a guide. The plan keeps what it
has counted in ``HF_HOME``; without that, all tables take about ten minutes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from alignment.config.dtypes import Machine, planning_for
from alignment.config.registry import METHODS
from alignment.methods.kto_options import KTOConfig
from alignment.planning.gpu_terms import usable_bytes
from alignment.planning.table import GB
from tools.documentation.page import table
from tools.ranks.client import ROOT

CONFIGURATIONS = Path(__file__).parent / "configurations"
DENSE = ("Llama-3.1-8B", "Qwen3-8B", "Qwen2.5-14B", "Qwen2.5-32B")
MODELS = (*DENSE, "Qwen3-30B-A3B", "gpt-oss-20b")
LENGTHS = (1024, 2048, 4096, 8192)
CARDS = (12, 16, 24, 48)
_LEAST = 1024  # tokens: fewer are of no use
GPU = Machine(1, cuda=True, reads_weights=False)
# What takes less memory for long sequences, by its name in the table.
REACH: dict[str, dict[str, Any]] = {
    "neither": {},
    "`tiled_mlp`": {"tiled_mlp": True},
    "`activation_offloading`": {"activation_offloading": True},
    "both": {"tiled_mlp": True, "activation_offloading": True},
}


class Row:
    """The memory of KTO on one row with adapters (r = 16), at ZeRO stage 2, with all layers recomputed.

    Create and use it within ``planning_for(GPU)``.

    Args:
        model: folder of its configuration.
        quantized: whether the base weights are in 4 bits.
        kernel: attention kernel.
        more: further options.
    """

    def __init__(self, model: str, quantized: bool, kernel: str = "flash", **more: Any) -> None:
        from alignment.training.arguments import model_sources
        from alignment.training.memory_plan import RunPlan

        path = str(CONFIGURATIONS / model)
        options = KTOConfig(
            output_dir="outputs/planned",
            model_name_or_path=path,
            use_peft=True,
            load_in_4bit=quantized,
            gradient_checkpointing=True,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=32,
            deepspeed="zero2",
            **{"tiled_mlp": False, **more},
        )
        method = METHODS.trainer(options).method_class(options)
        policy, reference = model_sources(path, None, options, method.needs_reference, method.task)
        self._planner = RunPlan(options, method, policy, reference, card=usable_bytes(24), kernel=kernel).planner

    def peak(self, tokens: int) -> float:
        """Return the peak in GB with the reserve."""
        return self._planner.plan(tokens).peak(reserve=True) / GB

    def longest(self, card: int) -> int:
        """Return the longest sequence that fits on a GPU, in tokens; 0 if only a few tokens do."""
        tokens = self._planner.longest_that_fits(usable_bytes(card))
        return tokens if tokens >= _LEAST else 0


def cells(model: str, quantized: bool, kernel: str, cards: tuple[int, ...]) -> Iterator[str]:
    """Yield the cells of a row."""
    with planning_for(GPU):
        row = Row(model, quantized, kernel)
        yield from (model, "4-bit" if quantized else "bf16")
        yield from (f"{row.peak(tokens):.1f}" for tokens in LENGTHS)
        yield from (f"{tokens:,}" if (tokens := row.longest(card)) else "–" for card in cards)


def fitting(kernel: str, cards: tuple[int, ...]) -> Iterator[str]:
    """Yield the lines of a table: peaks in GB by length, and the longest sequences by GPU."""
    lengths = " | ".join([f"{LENGTHS[0]:,} tokens", *(f"{tokens:,}" for tokens in LENGTHS[1:])])
    longest = " | ".join(f"longest on {card} GB" for card in cards)
    head, _, *rows = table(
        f"model | base weights | {lengths} | {longest}",
        (tuple(cells(model, bits, kernel, cards)) for model in MODELS for bits in (True, False)),
    )
    yield from (head, "|---|---|" + "--:|" * (len(LENGTHS) + len(cards)), *rows)


def reaching() -> Iterator[str]:
    """Yield the lines of a table: the longest sequences by GPU and by what takes less memory, with 4-bit weights."""

    def row(model: str, name: str) -> Iterator[str]:
        with planning_for(GPU):
            found = Row(model, quantized=True, **REACH[name])
            yield from (model, name)
            yield from (f"{tokens:,}" if (tokens := found.longest(card)) else "–" for card in CARDS)

    head = f"model | with | {' | '.join(f'longest on {card} GB' for card in CARDS)}"
    first, _, *rows = table(head, (tuple(row(model, name)) for model in DENSE for name in REACH))
    yield from (first, "|---|---|" + "--:|" * len(CARDS), *rows)


# The tables of each page.
PAGES: dict[str, dict[str, Callable[[], Iterator[str]]]] = {
    "README.md": {"24 GB": functools.partial(fitting, "flash", (24,))},
    "docs/guides/memory.md": {
        "flash attention": functools.partial(fitting, "flash", CARDS),
        "memory-efficient attention": functools.partial(fitting, "efficient", CARDS),
        "math attention": functools.partial(fitting, "math", CARDS),
    },
    "docs/guides/long-sequences.md": {"long sequences": reaching},
}


def written(text: str, page: str, title: str) -> str:
    """Return the text of a page with one of its tables written again."""
    lines = "\n".join(PAGES[page][title]())
    place = re.compile(rf"(?<=<!-- what fits: {title} -->\n).*?(?=<!-- end -->)", re.DOTALL)
    assert len(place.findall(text)) == 1, f"{page} has no place for the table {title}"
    return place.sub(lambda _: f"\n{lines}\n\n", text)


def main() -> None:
    """Write all tables."""
    for page, tables in PAGES.items():
        for title in tables:
            text = (ROOT / page).read_text(encoding="utf-8")
            (ROOT / page).write_text(written(text, page, title), encoding="utf-8")


if __name__ == "__main__":
    main()
