"""Precomputed reference log-probs: read from the cache, or computed there by an engine that is then released.

The pass over a dataset follows its evaluation plan and is stored part by part, so that parts computed before a run was
killed are not computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.config.options_model import ReferenceOptions
from alignment.data.batching import MicroBatches
from alignment.data.windows import Rows, WindowPlan, plan_window, set_partners
from alignment.engines.collectives import copied_from_first_rank, device, from_first_rank, sum_over_ranks
from alignment.engines.rng import RandomStreams
from alignment.internals.datasets import cache_folder
from alignment.references.content import adapters_content, source_content
from alignment.references.engine import EngineReference, ReferencePlan
from alignment.references.precomputed import LogpTable, PrecomputedReference, places
from alignment.references.store import LogpStore
from alignment.reporting.progress import Progress
from alignment.reporting.report import duration
from alignment.run.console import tell
from alignment.run.ranks import rank, world_size
from alignment.training.context import RunContext
from alignment.training.data import PreparedData, limits_of, order_seed
from alignment.training.method import Method

_ROWS = 10_000  # rows hashed at a time; affects the hash


class Opened(NamedTuple):
    """An opened store, known on every rank.

    Attributes:
        data: its dataset.
        partners: (R,) partners of the dataset's rows.
        folder: path on the first rank's machine.
        parts: total number of parts.
        missing: parts that have not been computed.
        store: the files; None except on the first rank.
    """

    data: PreparedData
    partners: Rows
    folder: Path
    parts: int
    missing: list[range]
    store: LogpStore | None


class ReferenceStores:
    """The stores of a run's datasets for its reference.

    Args:
        context: the run.
        plan: the reference, which is only loaded if a store is incomplete.

    Attributes:
        further: datasets that :meth:`reference` covers in addition to the run's own.

    Raises:
        OptionError: if the method does not define which sequences it needs.
    """

    def __init__(self, context: RunContext, plan: ReferencePlan) -> None:
        self.context, self.plan = context, plan
        self.further: tuple[PreparedData, ...] = ()
        self._adapters: dict[str, object] | None = None
        self._changed = False  # whether its files have changed since the run began
        self._content: dict[str, object] | None = (
            None  # fingerprint of the reference; of a live policy, taken before training
        )
        method = context.method
        if type(method).reference_sequences is Method.reference_sequences:
            raise OptionError(
                f"ref_placement='precomputed': {type(method).__name__} does not define reference_sequences, which "
                "says what to precompute; define it, or set ref_placement to offload, sharded or replica"
            )

    def reference(self) -> PrecomputedReference:
        """Return a reference that covers the run's datasets and further ones; collective, before the policy exists."""
        self._content = None  # a live model may have changed since engines were last built
        return PrecomputedReference(self.tables((*self.own, *self.further)), len(self.context.method.completions))

    def tables(self, datasets: Iterable[PreparedData], *, loadable: bool = True) -> dict[str, LogpTable]:
        """Return the log-probs of these datasets by their keys; collective.

        Args:
            datasets: duplicates are allowed.
            loadable: whether the reference can still be loaded as given.

        Raises:
            OptionError: if something is missing that can no longer be computed.
            OutputError: if a store cannot be written.
        """
        opened = self._opened(datasets)
        seconds: dict[str, float] = {}
        if any(one.missing for one in opened):
            named = next(one.data.where for one in opened if one.missing)
            if from_first_rank(self._changed):
                source = self.plan.source.name
                raise OptionError(
                    f"{named}: its reference log-probs are not in the cache, and the files of {source} or of its "
                    "adapters have changed since the run began; pass it to the constructor as eval_dataset"
                )
            if not loadable:
                raise OptionError(
                    f"{named}: its reference log-probs are not in the cache, and the initial policy, which is the "
                    "reference, has been trained; pass it to the constructor as eval_dataset, or the model as a path"
                )
            with _random_streams_kept():
                seconds = self._fill(opened)
        for one in opened:
            self._tell(one, seconds.get(one.data.key))
        return {one.data.key: LogpTable(_shared(one, self._width), one.partners) for one in opened}

    def lines(self) -> list[str]:
        """Describe each store of the run's datasets without writing anything; collective."""
        said = []
        for one in self._opened(self.own, prepare=False):
            there = one.parts - len(one.missing)
            state = "complete" if not one.missing else f"{there} of {one.parts} parts" if there else "not computed yet"
            said.append(f"reference log-probs of {one.data.where}: {state}, {one.folder}")
        return said

    @property
    def own(self) -> list[PreparedData]:
        """The datasets of the run."""
        given = (self.context.data.train, *self.context.data.eval.values())
        return [data for data in given if data is not None]

    @property
    def _width(self) -> int:
        """Sequences per row."""
        return len(self.context.method.completions) + self.context.method.draws_partners

    def _opened(self, datasets: Iterable[PreparedData], *, prepare: bool = True) -> list[Opened]:
        """Open each store on the first rank, and share what it contains."""
        if self._content is None or not self.plan.copies_policy:
            memory = _folder() / "file-hashes.json"
            before = self._content, self._adapters
            self._content = source_content(self.plan.source, memory, keep=rank() == 0)
            self._adapters = None
            if self.plan.adapters is not None and rank() == 0:
                self._adapters = adapters_content(self.plan.adapters, memory)
            if before[0] is not None and before != (self._content, self._adapters):
                self._content, self._adapters = before
                self._changed = True
        opened = []
        for data in {data.key: data for data in datasets}.values():
            partners = set_partners(data.table, order_seed(self.context.args), self.context.method.draws_partners)
            store, seen = None, None
            if rank() == 0:
                store = LogpStore(_folder(), self.key(data), partners, self._width)
                for fault in store.read():
                    tell(fault)
                if prepare and store.missing and not self._changed:
                    store.prepare()
                seen = store.folder, len(store.parts), store.missing
            folder, parts, missing = from_first_rank(seen)
            opened.append(Opened(data, partners, folder, parts, list(missing), store))
        return opened

    def key(self, data: PreparedData) -> dict[str, object]:
        """Return everything that the values depend on, by name; on the first rank."""
        args, method, plan = self.context.args, self.context.method, self.plan
        quantization = plan.source.quantization
        return {
            "rows": rows_content(data, method.completions),
            "lengths": asdict(limits_of(args)),
            "partners": order_seed(args) if method.draws_partners else None,
            "mismatched": method.draws_partners,
            "model": {**(self._content or {}), "attention": args.attn_implementation, **_kernels(args)},
            "adapters": self._adapters,
            "dtype": str(plan.dtype),
            "quantization": None if quantization is None else quantization.config.to_dict(),
        }

    def _fill(self, opened: list[Opened]) -> dict[str, float]:
        """Compute every missing part; return the seconds spent per dataset key."""
        context, seconds = self.context, {}
        windows = {one.data.key: [(part, self._plan(one, part)) for part in one.missing] for one in opened}
        total = sum(len(plan.micro_batches) for parts in windows.values() for _, plan in parts)
        shown = context.is_first and not context.args.disable_tqdm
        engine = self.plan.build(context.args)
        progress = Progress(total, "precompute", shown, device())
        try:
            for one in opened:
                start = time.monotonic()
                for part, plan in windows[one.data.key]:
                    found = self._part(engine, one.data, part, plan, progress)
                    if one.store is not None:
                        one.store.write(part, found.numpy())
                if one.missing:
                    seconds[one.data.key] = time.monotonic() - start
        finally:
            progress.close()
            engine.close()
        return seconds

    def _plan(self, one: Opened, part: range) -> WindowPlan:
        """Return the evaluation plan of the rows of one part."""
        args = self.context.args
        rows = np.arange(part.start, part.stop, dtype=np.int64)
        asked = args.precompute_ref_batch_size if isinstance(args, ReferenceOptions) else None
        return plan_window(
            one.data.table,
            rows,
            one.partners[rows],
            world_size=world_size(),
            batch_size=asked or args.eval_batch_size,
            max_tokens=None if asked else args.max_tokens_per_batch,
        )

    def _part(
        self, engine: EngineReference, data: PreparedData, part: range, plan: WindowPlan, progress: Progress
    ) -> Tensor:
        """Return (rows of the part, sequences per row) fp32 values on the host of every rank."""
        method = self.context.method
        found = torch.zeros((len(part), self._width), dtype=torch.float32, device=device())
        with self.context.phases("precompute") as record:
            for batch in MicroBatches(method.kind.collate, data.dataset, data.table, plan, rank()):
                asked, ids = method.reference_sequences(batch, data.key)
                rows, columns = places(ids, len(method.completions))
                found[(rows - part.start).to(found.device), columns.to(found.device)] = engine.sequence_logps(
                    asked, ids
                )
                record.tokens += asked.tokens
                progress.advance()
            return sum_over_ranks(found).cpu()

    def _tell(self, one: Opened, seconds: float | None) -> None:
        """Print where a store is and what it saves."""
        if one.store is None:
            return
        size, epochs = one.store.size, self.context.args.num_train_epochs
        place = f"{one.folder} ({len(one.partners):,} rows, {size:,} bytes)"
        if seconds is None:
            how, saved = (
                "found in",
                "; steps run without the reference, which saves about a third of the time of a LoRA step",
            )
        else:
            how = f"computed in {duration(seconds)}, stored in"
            saved = "; from the second epoch on, this saves about a third of the time of a LoRA step"
            if self.context.args.max_steps < 0 and epochs <= 1:
                saved += f"; with num_train_epochs={epochs:g}, only later runs are faster"
        saved = saved if one.data is self.context.data.train else ""
        tell(f"reference log-probs of {one.data.where}: {how} {place}{saved}")


def _kernels(args: AlignmentConfig) -> dict[str, object]:
    """Return the options for layer kernels, which round differently; Hub kernels are part of the model's arguments."""
    return {"liger": args.liger_kernel_config or {}} if args.use_liger_kernel else {}


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


def _folder() -> Path:
    return cache_folder() / "deepspeed-alignment"


def _shared(one: Opened, width: int) -> Tensor:
    """Broadcast the first rank's values to every rank's host memory."""
    values = torch.zeros((len(one.partners), width), dtype=torch.float32)
    if one.store is not None:
        values = torch.from_numpy(one.store.values)
    return copied_from_first_rank(values.to(device())).cpu()


@contextlib.contextmanager
def _random_streams_kept() -> Iterator[None]:
    """Keep random streams unchanged, so that runs that find and runs that compute a store draw the same numbers."""
    streams = RandomStreams()
    before = streams.state_dict()
    try:
        yield
    finally:
        streams.load_state_dict(before)
