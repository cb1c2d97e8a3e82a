"""Write the local Hub to a folder: models in the layout of the Hub cache, rows in that of the ``datasets`` cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

import transformers

from tools.ranks.client import ROOT
from tools.trl.hub import rows

_HASH = "0" * 40


def prepare(folder: Path) -> Path:
    """Return the Hub, a value for ``HF_HOME``, for this module and release of transformers; build it on first use."""
    digest = hashlib.sha256(transformers.__version__.encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    home = folder / digest.hexdigest()[:12]
    if not home.exists():
        print(f"building the local Hub in {home}", file=sys.stderr)
        partial = folder / f"{home.name}.{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        build(partial)
        partial.rename(home)
    return home


def environment(home: Path) -> dict[str, str]:
    """Return the environment of tests and scripts: the Hub at ``home``, no network, no trackers, one thread each."""
    names = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "HF_TOKEN")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    own = {
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": f"{home}/datasets",
        "PYTHONPATH": str(ROOT),
    }
    own |= {"TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    return {"DS_ACCELERATOR": "cpu", **kept, **own}


def build(home: Path) -> None:
    """Write all files."""
    from tools.trl.hub import models

    texts = rows.texts()
    for tiny in models.MODELS:
        models.save(tiny, texts, snapshot(home, tiny.repository))
    for name, configs in {"zen": rows.zen(), "harmony": rows.harmony(), "toolcall": rows.toolcall()}.items():
        for config, columns in reversed(configs.items()):  # the newest one is used by calls without a name
            write_rows(home, f"{models.ORGANIZATION}/{name}", config, columns)
    chats = rows.conversational()["language_modeling"]
    write_rows(home, f"{models.ORGANIZATION}/dolly-chatml-sft", "default", chats)
    write_rows(home, "stanfordnlp/imdb", "plain_text", rows.reviews())
    for repository, columns in rows.of_scripts().items():
        write_rows(home, repository.lower(), "default", columns)  # the folder names of datasets


def snapshot(home: Path, repository: str) -> Path:
    """Return the folder that ``from_pretrained(repository)`` reads without a network."""
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(_HASH)
    (folder / "snapshots" / _HASH).mkdir(parents=True, exist_ok=True)
    return folder / "snapshots" / _HASH


def write_rows(home: Path, repository: str, config: str, columns: rows.Columns) -> None:
    """Write a training split and a test split (10% of the rows) that ``load_dataset`` finds without a network."""
    from datasets import Dataset, DatasetInfo
    from datasets.arrow_writer import ArrowWriter
    from datasets.naming import filename_prefix_for_split
    from datasets.splits import SplitDict, SplitInfo

    organization, _, name = repository.partition("/")
    digest = hashlib.sha256(config.encode()).hexdigest()
    folder = home / "datasets" / f"{organization}___{name}" / config / "0.0.0" / digest
    folder.mkdir(parents=True)
    whole = Dataset.from_dict(columns, on_mixed_types="use_json")
    splits = whole.train_test_split(test_size=0.1, shuffle=False)
    infos = SplitDict(dataset_name=name)
    for split, part in splits.items():
        file = folder / f"{filename_prefix_for_split(name, split)}.arrow"
        with ArrowWriter(path=str(file), features=whole.features) as writer:
            writer.write_table(part.with_format("arrow")[:])
            writer.finalize()
        infos.add(SplitInfo(split, num_examples=len(part), dataset_name=name))
    named = {"builder_name": "parquet", "dataset_name": name, "config_name": config, "version": "0.0.0"}
    DatasetInfo(features=whole.features, splits=infos, **named).write_to_directory(str(folder))
