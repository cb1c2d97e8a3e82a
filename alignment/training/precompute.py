"""Precomputed reference log-probs: read from the cache, or computed there by an engine that is then released.

A pass is stored part by part, so that parts computed before a run was killed are not computed again.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignment.config.errors import OptionError
from alignment.config.options_model import ReferenceOptions
from alignment.data.batching import MicroBatches
from alignment.data.windows import Rows, WindowPlan, plan_window, set_partners
from alignment.engines.collectives import copied_from_first_rank, device, on_first_rank, sum_over_ranks
from alignment.engines.rng import preserved
from alignment.references.content import adapters_content, source_content
from alignment.references.engine import EngineReference, ReferencePlan
from alignment.references.precomputed import LogpTable, PrecomputedReference, places
from alignment.references.store import LogpStore
from alignment.reporting.formats import duration
from alignment.reporting.progress import Progress
from alignment.run.ranks import rank, tell, world_size
from alignment.training.context import RunContext
from alignment.training.data import PreparedData, limits_of, order_seed, tokenized_folder
from alignment.training.method import Method

_ROWS = 10_000  # rows hashed at a time; affects the hash


class ReferenceStores:
    """The stores of a run's datasets for its reference, one per dataset; it is only loaded if one is incomplete."""

    def __init__(self, context: RunContext, plan: ReferencePlan) -> None:
        self.context, self.plan, method = context, plan, context.method
        self._width = len(method.completions) + method.draws_partners  # sequences per row
        # Fingerprints of reference and adapters; those of a live policy are taken before training.
        self._content: tuple[dict[str, Any], dict[str, Any] | None] | None = None
        if type(method).reference_sequences is Method.reference_sequences:
            raise OptionError(
                f"ref_placement='precomputed': {type(method).__name__} does not define reference_sequences, which "
                "says what to precompute; define it, or set ref_placement to offload, sharded or replica"
            )

    def reference(self) -> PrecomputedReference:
        """Return a reference that covers the run's datasets; collective, before the policy exists."""
        if self.plan.copies_policy:  # a live model may have changed since engines were last built
            self._content = None
        opened, seconds = self._opened(prepare=True), dict[str, float]()
        if any(store.missing for _, store in opened):
            # Runs that find a store and runs that compute it draw the same random numbers.
            with preserved():
                seconds = self._fill(opened)
        tables = {}
        for data, store in opened:
            if rank() == 0:
                spent = seconds.get(data.key)
                how = "found" if spent is None else f"computed in {duration(spent)}, stored"
                place = f"{store.folder} ({len(store.partners):,} rows, {store.size:,} bytes)"
                tell(f"reference log-probs of {data.where}: {how} in {place}")
            values = copied_from_first_rank(torch.from_numpy(store.values).to(device())).cpu()
            tables[data.key] = LogpTable(values, store.partners)
        return PrecomputedReference(tables, len(self.context.method.completions))

    def lines(self) -> list[str]:
        """Describe each store of the run's datasets without writing anything; collective."""
        said = []
        for data, store in self._opened(prepare=False):
            total, missing = len(store.parts), len(store.missing)
            state = f"{total - missing} of {total} parts" if missing < total else "not computed yet"
            said.append(f"reference log-probs of {data.where}: {state if missing else 'complete'}, {store.folder}")
        return said

    def _opened(self, *, prepare: bool) -> list[tuple[PreparedData, LogpStore]]:
        """Open the store of each dataset: its files on the first rank, what is missing on every rank."""
        folder = tokenized_folder()
        if self._content is None:
            memory, adapters = folder / "file-hashes.json", self.plan.adapters if rank() == 0 else None
            content = source_content(self.plan.source, memory, keep=rank() == 0)
            self._content = content, None if adapters is None else adapters_content(adapters, memory)
        opened = []
        for data in {data.key: data for data in self.context.data.sets}.values():
            partners = set_partners(data.table, order_seed(self.context.args), self.context.method.draws_partners)
            store = LogpStore(folder, self.key(data) if rank() == 0 else {}, partners, self._width)
            store.missing = on_first_rank(functools.partial(_missing, store, prepare))
            opened.append((data, store))
        return opened

    def key(self, data: PreparedData) -> dict[str, object]:
        """Return everything that the values depend on, by name; on the first rank."""
        args, method, plan = self.context.args, self.context.method, self.plan
        quantization = plan.source.quantization
        content, adapters = self._content or ({}, None)
        # Layer kernels round differently. Hub kernels are part of the model's arguments.
        kernels = {"liger": args.liger_kernel_config or {}} if args.use_liger_kernel else {}
        return {
            "rows": rows_content(data, method.completions),
            "lengths": asdict(limits_of(args)),
            "partners": order_seed(args) if method.draws_partners else None,
            "mismatched": method.draws_partners,
            "model": {**content, "attention": args.attn_implementation, **kernels},
            "adapters": adapters,
            "dtype": str(plan.dtype),
            "quantization": None if quantization is None else quantization.content(),
        }

    def _fill(self, opened: list[tuple[PreparedData, LogpStore]]) -> dict[str, float]:
        """Compute every missing part; return the seconds spent per dataset key."""
        context, seconds = self.context, {}
        engine = self.plan.build(context.args)
        shared = engine.engine.shares
        windows = [[(p, self._plan(data, store.partners, p, shared)) for p in store.missing] for data, store in opened]
        total = sum(len(plan.micro_batches) for parts in windows for _, plan in parts)
        progress = Progress(total, "precompute", context.args.disable_tqdm, device())
        try:
            for (data, store), parts in zip(opened, windows):
                start = time.monotonic()
                for part, plan in parts:
                    found = self._part(engine, data, part, plan, progress)
                    if rank() == 0:
                        store.write(part, found.numpy())
                if parts:
                    seconds[data.key] = time.monotonic() - start
        finally:
            progress.close()
            engine.close()
        return seconds

    def _plan(self, data: PreparedData, partners: Rows, part: range, shared: bool) -> WindowPlan:
        """Return the evaluation plan of the rows of one part."""
        args, rows = self.context.args, np.arange(part.start, part.stop, dtype=np.int64)
        asked = args.precompute_ref_batch_size if isinstance(args, ReferenceOptions) else None
        size, tokens = asked or args.eval_batch_size, None if asked else args.max_tokens_per_batch
        own, ranks = partners[rows], world_size()
        return plan_window(data.table, rows, own, world_size=ranks, batch_size=size, max_tokens=tokens, packs=shared)

    def _part(
        self, engine: EngineReference, data: PreparedData, part: range, plan: WindowPlan, progress: Progress
    ) -> Tensor:
        """Return (rows of the part, sequences per row) fp32 values on the host of every rank."""
        method = self.context.method
        found = torch.zeros((len(part), self._width), dtype=torch.float32, device=device())
        with self.context.phases("precompute") as record:
            for batch in MicroBatches(method.kind.collate, data.dataset, plan, rank()):
                asked, ids = method.reference_sequences(batch, data.key)
                rows, columns = places(ids, len(method.completions))
                values = engine.sequence_logps(asked, ids)
                found[(rows - part.start).to(found.device), columns.to(found.device)] = values
                record.tokens += asked.tokens
                progress.advance()
            return sum_over_ranks(found).cpu()


def rows_content(data: PreparedData, completions: Iterable[str]) -> str:
    """Return a hash of the tokens of all rows in order."""
    digest = hashlib.blake2b(digest_size=16)
    names = ["prompt_ids", *completions]
    for table in data.dataset.select_columns(names).with_format("arrow").iter(_ROWS):
        for name in names:
            column = table[name].combine_chunks()  # chunks depend on how the rows were put together
            digest.update(np.asarray(column.value_lengths(), dtype="<i8").tobytes())
            digest.update(np.asarray(column.flatten(), dtype="<i8").tobytes())
    return digest.hexdigest()


def _missing(store: LogpStore, prepare: bool) -> list[range]:
    """Read a store, and return its missing parts."""
    for fault in store.read():
        tell(fault)
    if prepare and store.missing:
        store.prepare()
    return store.missing
