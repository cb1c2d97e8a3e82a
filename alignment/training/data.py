"""Prepare the datasets of a run: tokenized rows on every rank, and the windows of training.

The first rank tokenizes and the others read its cache; a node with its own cache tokenizes separately.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, IterableDataset

from alignment.checkpoint.best import check_best_metric
from alignment.checkpoint.run_folder import check_filled, fills
from alignment.config.errors import DataError, OptionError, setting
from alignment.config.fields import keywords
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import MixturePart, mixture_parts, tested_parts
from alignment.data.columns import arranged, used_columns
from alignment.data.mixture import Part, mixed
from alignment.data.packed_rows import PackedRows
from alignment.data.packing import Packing, Packs, pack_rows
from alignment.data.prepare import check_cache, load_prepared, prepare
from alignment.data.report import DataReport, joined
from alignment.data.sources import dataset_from_python, from_stream, load_split
from alignment.data.tokenization import Limits
from alignment.data.windows import RowTable, WindowSampler, row_table, set_partners
from alignment.engines.collectives import barrier, from_first_rank, gathered, together
from alignment.engines.optimizers import check_optimization
from alignment.internals.datasets import cache_folder
from alignment.reporting.progress import draws_bars
from alignment.run.ending import OtherRankFailed
from alignment.run.ranks import local_rank, tell, world_size
from alignment.run.retries import Retries
from alignment.training.advice import about_rows, about_strings
from alignment.training.arguments import named_datasets
from alignment.training.method import AnyMethod
from alignment.training.preparation import PlannedModels

TRAINING = "train_dataset"  # name of the training rows in messages, unless they have their own


def training_data(options: AlignmentConfig) -> Part:
    """Return the training data that ``dataset_name`` or ``dataset_mixture`` selects."""
    if options.dataset_mixture is None:
        return _split(options, options, options.dataset_train_split)
    parts = mixture_parts(options.dataset_mixture)
    loaded = tuple(replace(_split(options, part, part.split), weight=part.weight) for part in parts)
    return Part("dataset_mixture", lambda: loaded)


def evaluation_data(options: AlignmentConfig) -> Part | None:
    """Return the evaluation data, or None: for a mixture, all rows of the parts that have a split for it."""
    if options.dataset_mixture is None:
        return None if options.dataset_test_split is None else _split(options, options, options.dataset_test_split)
    loaded = tuple(_split(options, part, split) for part, split in tested_parts(options))
    return Part("dataset_mixture (evaluation)", lambda: loaded) if loaded else None


def _split(whole: AlignmentConfig, options: AlignmentConfig | MixturePart, split: str | None) -> Part:
    """Return a split of a dataset; messages name it only if it is not the one of training."""
    usual, name = whole.dataset_train_split, options.dataset_name
    split = split or usual
    assert name is not None
    where = name if split == usual else f"{name} ({split})"
    maps: dict[str, Any] = {"column_map": options.column_map, "label_map": options.label_map}
    return Part(where, functools.partial(load_split, name, options.dataset_config, split), **maps)


class PreparedPart(NamedTuple):
    """A dataset of a mixture: its name in messages, and statistics of its rows."""

    where: str
    report: DataReport


@dataclass(frozen=True)
class PreparedData:
    """A tokenized dataset with what planning needs and statistics of the source rows.

    ``parts`` has one entry, or one per part of a mixture, in the order of the rows. ``key`` identifies the tokenized
    rows, their order and their packing. With packing, ``table`` has one entry per pack.
    """

    where: str
    key: str
    dataset: Dataset
    table: RowTable
    report: DataReport
    parts: tuple[PreparedPart, ...]
    packs: Packs | None = None

    @property
    def batched(self) -> Dataset | PackedRows:
        """What batches are made of: rows or packs."""
        return self.dataset if self.packs is None else PackedRows(self.dataset, self.packs)

    def place(self, row: int) -> str:
        """Return the name of a tokenized row in messages."""
        number = self.source_row(row)
        return number if isinstance(number, str) else f"{self.where}, row {number}"

    def source_row(self, row: int) -> int | str:
        """Return the 1-based number of a tokenized row in the user's data; in a mixture, with the name of its part."""
        number = int(self.dataset[row]["row"]) + 1
        if len(self.parts) == 1:
            return number
        ends = list(itertools.accumulate(part.report.rows_out for part in self.parts))
        return f"{self.parts[bisect.bisect_right(ends, row)].where}, row {number}"

    def sources(self, planned: Iterable[int]) -> list[int | str]:
        """Return the source rows of entries of a plan: of rows, or of all rows of the packs."""
        if self.packs is not None:
            planned = {row for pack in planned for row in self.packs.rows(pack)}
        return [self.source_row(row) for row in sorted(planned)]


@dataclass
class RunData:
    """The data of a run: training rows and their windows, or None, evaluation sets by name, and advice about them.

    ``packs`` tells whether the policy packs the sequences of a micro-batch, and computes the prompt of a pair once;
    known after its engine is built.
    ``max_tokens`` is the limit of a micro-batch: ``max_tokens_per_batch``, or what ``auto_find_batch_size`` found.
    """

    train: PreparedData | None = None
    sampler: WindowSampler | None = None
    eval: dict[str, PreparedData] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)
    packs: bool = False
    max_tokens: int | None = None

    def limit(self, max_tokens: int | None) -> None:
        """Limit the micro-batches of all windows from now on; the windows stay the same."""
        self.max_tokens = max_tokens
        if self.sampler is not None:
            self.sampler.max_tokens = max_tokens

    @property
    def sets(self) -> list[PreparedData]:
        """All datasets, training data first."""
        return [data for data in (self.train, *self.eval.values()) if data is not None]


def limits_of(options: Any) -> Limits:
    """Return the length limits that the options set for rows."""
    most, prompt, completion = options.max_length, options.max_prompt_length, options.max_completion_length
    return Limits(most, prompt, completion, options.truncation_mode, getattr(options, "SHORTEN_PROMPTS", False))


def order_seed(options: AlignmentConfig) -> int:
    """Return the seed for the order of rows and of their partners."""
    return options.seed if options.data_seed is None else options.data_seed


def tokenized_folder() -> Path:
    """Return the folder of tokenized rows."""
    return cache_folder() / "deepspeed-alignment"


@dataclass
class DataPreparation:
    """Tokenizes the datasets of a run for its method, and retries reads that fail for a transient reason."""

    args: AlignmentConfig
    method: AnyMethod
    models: PlannedModels
    retries: Retries
    first: dict[str, Any] | None = None  # the first row of the data, on ranks that tokenize

    def __call__(self, train_dataset: Any, eval_dataset: Any, own_optimizer: bool) -> RunData:
        """Return the data of a run, with advice about settings that are unlikely to work well."""
        args, data = self.args, RunData(max_tokens=self.args.max_tokens_per_batch)
        if train_dataset is not None:
            data.train = self.one(train_dataset, args.max_train_samples, TRAINING, trains=True)
            data.sampler = window_sampler(data.train, self.method, args)
            report, window = data.train.report, data.sampler.window
            data.advice = [*about_rows(report, len(self.method.completions)), *self.method.advice(report, window)]
            if self.first is not None and not args.apply_chat_template:
                data.advice += about_strings(self.first, self.models.processing_class)
            if not own_optimizer:
                tell(check_optimization(args, total_steps(args, data.sampler)))
            for sentence in () if args.dry_run else data.advice:
                tell(f"advice: {sentence}")
        for name, source in named_datasets(eval_dataset).items():
            data.eval[name] = self.one(source, args.max_eval_samples, f"eval_dataset {name}".rstrip())
        return data

    def one(self, source: Any, limit: int | None, where: str, *, trains: bool = False) -> PreparedData:
        """Tokenize a dataset on one rank per cache, or find it there, and read it on every rank. Collective.

        ``source`` is a dataset, a list of rows, or a :class:`Part`, which is loaded where rows are tokenized.

        Raises:
            DataError: naming file, row, key and value; or if a node has prepared different rows from the first one.
        """
        where, packing, retries = getattr(source, "where", where), self.method.packing(trains), self.retries
        folder, seed, made = tokenized_folder(), order_seed(self.args), None
        with together(OtherRankFailed):
            if local_rank() == 0:
                check_cache(cache_folder())
            if fills(cache_folder()):
                given = retries(where, source.load) if isinstance(source, Part) else source
                parts = given if isinstance(given, tuple) else (Part(where, lambda: given),)
                # Cutting parts first would change the sizes of those without weights, and lose rows if any is dropped.
                first = limit if len(parts) == 1 else None
                made = [(part.where, self._tokenized(part, first, packing).name, part.weight) for part in parts]
        # A folder's name is a hash of its content, so the first rank's name is right on every node.
        made = from_first_rank(made)
        barrier()
        check_filled(folder, [name for _, name, _ in made], where)
        read = [(name, retries(name, functools.partial(load_prepared, folder / key)), w) for name, key, w in made]
        retries.counted(gathered(retries.taken()))
        dataset, reports = read[0][1].dataset, [read[0][1].report]
        if len(read) > 1:
            dataset, reports = mixed(read, limit, seed)
        chosen = [(Path(name).stem, weight) for _, name, weight in made]
        made_of = (chosen, limit, seed, *(() if packing is None else (packing,)))
        key = hashlib.blake2b(repr(made_of).encode(), digest_size=16).hexdigest()
        report, packs = joined(reports), None
        if packing is None:
            table = row_table(dataset, self.method.completions, self._limits(None).max_length)
        else:
            packs = pack_rows(dataset, packing)
            if not len(packs):
                raise DataError(
                    f"{where}: no pack of {packing.length} tokens has a token to train on; increase max_length or "
                    "check the rows"
                )
            table, count, tokens = packs.table, len(packs), int(packs.tokens.sum())
            report = replace(report, packs=count, pack_length=packing.length, pack_tokens=tokens)
            report = replace(report, pack_left_out=packs.left_out)
        tell(f"{where}: {report.summary()}")
        used = tuple(PreparedPart(name, own) for (name, _, _), own in zip(read, reports))
        return PreparedData(where, key, dataset, table, report, used, packs)

    def _limits(self, packing: Packing | None) -> Limits:
        """Return the length limits for rows; ``max_length: null`` is the fewest positions of the models, if any."""
        limits = limits_of(self.args)
        if packing is not None and packing.whole_rows:  # rows that packing cuts are not cut before
            return replace(limits, max_length=None)
        if limits.max_length is not None:
            return limits
        texts = [source.config.get_text_config() for source in (self.models.policy, self.models.reference)]
        positions = [getattr(text, "max_position_embeddings", None) or 0 for text in texts]
        return replace(limits, max_length=min((number for number in positions if number > 0), default=None))

    def _tokenized(self, part: Part, limit: int | None, packing: Packing | None) -> Path:
        """Return the folder with the tokenized rows of one part."""
        options, kind, where, folder = self.args, self.method.kind, part.where, tokenized_folder()
        column_map = keywords(options.column_map) if part.column_map is None else part.column_map
        data = self.retries(where, part.load)
        if isinstance(data, IterableDataset):
            if options.ref_placement == "precomputed":
                raise OptionError(
                    f"{setting('ref_placement', 'precomputed')}: not supported for {where}, an IterableDataset, since "
                    "log-probs are stored by row; pass a Dataset, or set another ref_placement"
                )
            rows, columns = _rows_of_stream(where, limit, options, packing), used_columns(kind, column_map)
            data = self.retries(where, functools.partial(from_stream, data, rows, columns, where, folder))
        elif not isinstance(data, Dataset):
            data = dataset_from_python(data)
        data = data if limit is None else data.select(range(min(limit, len(data))))
        tokenizer, limits = self.models.processing_class, self._limits(packing)
        path = prepare(
            *(data, kind, tokenizer, limits, where, folder),
            column_map=column_map,
            label_map=keywords(options.label_map) if part.label_map is None else part.label_map,
            apply_chat_template=options.apply_chat_template,
            num_proc=options.dataset_num_proc,
            strict=options.strict_data,
            method=options.TITLE,
            progress=draws_bars(options.disable_tqdm),
        )
        if self.first is None:
            self.first = arranged(data.select([0]), column_map, kind, where)[0][0]
        return path


def _rows_of_stream(where: str, limit: int | None, options: AlignmentConfig, packing: Packing | None) -> int | None:
    """Return how many rows of a stream are needed; None for all of an evaluation set without a limit."""
    if not where.startswith(TRAINING):
        return limit
    if packing is not None and limit is None:
        raise OptionError(
            f"{setting('packing', True)}: {where} is an IterableDataset, and the number of rows needed for max_steps "
            "is not known before packing; set max_train_samples, or pass a Dataset"
        )
    steps = options.max_steps * options.window_size if options.max_steps > 0 else None
    known = [rows for rows in (limit, steps) if rows is not None]
    if not known:
        raise DataError(
            f"{where}: is an IterableDataset, which may be endless; set max_steps (or max_train_samples), or pass "
            "a Dataset"
        )
    return min(known)


def window_sampler(data: PreparedData, method: AnyMethod, args: AlignmentConfig) -> WindowSampler:
    """Return the sampler of the training data; DataError if the only window is incomplete and would be dropped."""
    fixed = args.ref_placement == "precomputed" and method.draws_partners  # partners are stored with the log-probs
    sampler = WindowSampler(
        data.table,
        world_size=world_size(),
        batch_size=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        seed=order_seed(args),
        draw_partners=method.draws_partners,
        stratify=args.stratify_labels,
        sequential=args.train_sampling_strategy == "sequential",
        drop_last=args.dataloader_drop_last,
        max_tokens=args.max_tokens_per_batch,
        partners=set_partners(data.table, order_seed(args), draw=True) if fixed else None,
    )
    if sampler.steps_per_epoch == 0:
        raise DataError(
            f"{data.where}: the {len(data.table)} {'rows' if data.packs is None else 'packs'} do not fill a window of "
            f"{sampler.window}; set dataloader_drop_last: false or a smaller batch"
        )
    return sampler


def total_steps(args: AlignmentConfig, sampler: WindowSampler) -> int:
    """Return the number of optimizer steps of the whole run."""
    return args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * sampler.steps_per_epoch)


def check_evaluation(args: AlignmentConfig, metrics: Iterable[str], evaluation: dict[str, PreparedData]) -> None:
    """Check that there is the data and the metric that the options evaluate; OptionError if not."""
    if evaluation:
        check_best_metric(args, tuple(metrics), evaluation)
    elif args.eval_strategy != "no" or args.eval_on_start:
        raise OptionError(
            f"eval_strategy: {args.eval_strategy} (eval_on_start: {args.eval_on_start}) requires evaluation "
            "data; set dataset_test_split, or pass eval_dataset"
        )
