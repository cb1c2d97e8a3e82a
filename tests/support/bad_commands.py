"""Invalid commands for ``test_bad_input``; those of Online DPO and reward models are in ``bad_online_commands``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import T5Config

from support.bad_case import CHAT, Case, deepspeed_case
from support.bad_online_commands import ONLINE, write_classifiers
from support.data_tokenizers import char_tokenizer
from support.helpers import POSITIONS, make_model, paired_rows, unpaired_rows

TOKENS = len(char_tokenizer())
IDENTICAL = {"chosen": "the same", "rejected": "the same"}


OPTIONS = [
    Case("unknown option", ("learning_rte='1e-4'", "did you mean 'learning_rate'"), {"learning_rte": "1e-4"}),
    Case("option to come", ("sync_ref_model=True", "not supported yet"), {"sync_ref_model": "true"}),
    Case(
        "offloading what is not saved",
        ("activation_offloading=True and gradient_checkpointing=False", "remove one of them"),
        {"activation_offloading": "true", "gradient_checkpointing": "false"},
    ),
    Case(
        "unknown target module",
        ("lora_target_modules: the model has no 'q_prj'", "did you mean 'q_proj'", "gate_proj"),
        {"use_peft": "true", "lora_target_modules": "q_prj"},
    ),
    Case(
        "the full model as its own reference",
        ("ref_placement='adapter': requires adapters", "set use_peft"),
        {"ref_placement": "adapter"},
    ),
    Case(
        "name of another framework", ("resume='true': unknown option; set resume_from_checkpoint",), {"resume": "true"}
    ),
    Case(
        "pairs that are none",
        ("column_map='prompt': expected name=value,name=value, each name once, or JSON",),
        {"column_map": "prompt"},
    ),
    Case(
        "label_map without labels", ("label_map={'up': True}: the rows of CPO",), {"label_map": "up=1"}, method="cpo"
    ),
    Case(
        "label with two meanings",
        ("label_map='Up=true,up=false': a value that differs only in case has another meaning",),
        {"label_map": "Up=true,up=false"},
    ),
    Case("resuming", ("resume_from_checkpoint='@out'", "no such folder"), {"resume_from_checkpoint": "@out"}),
    Case(
        "early stopping without evaluations",
        ("early_stopping_patience=3: requires evaluations", "set eval_strategy"),
        {"early_stopping_patience": "3"},
    ),
    Case(
        "smaller micro-batches without a rehearsal",
        ("auto_find_batch_size=True and memory_rehearsal='false'", "remove one of them"),
        {"auto_find_batch_size": "true", "memory_rehearsal": "false"},
    ),
    Case("a rehearsal of another kind", ("memory_rehearsal='once': must be 'auto'",), {"memory_rehearsal": "once"}),
    Case("some MLPs", ("tiled_mlp='some': must be true",), {"tiled_mlp": "some"}),
    Case("some layers", ("gradient_checkpointing='some': must be true",), {"gradient_checkpointing": "some"}),
    Case("packing of another kind", ("pack='all': must be 'auto', 'true' or 'false'",), {"pack": "all"}),
    Case("no model", ("model_name_or_path is required", "set it to a folder"), {"model_name_or_path": None}),
    Case(
        "window of one row",
        ("gradient_accumulation_steps=1", "per_device_train_batch_size=1", "to 2 or more (16 recommended)"),
        {"per_device_train_batch_size": "1", "gradient_accumulation_steps": "1"},
    ),
]

DATA = [
    Case(
        "missing file",
        ("@absent.jsonl", "file or folder does not exist", "dataset_name"),
        {"dataset_name": "@absent.jsonl"},
    ),
    Case("torn file", ("@data.jsonl, line 3: invalid JSON",), data='{"prompt": "a"}\n\n{"prompt": "b", "compl'),
    Case(
        "label is a text",
        ("@data.jsonl, row 5: label is 'yes' (a string)", "true or false"),
        data=[*unpaired_rows(4), {"prompt": "ab", "completion": "cd", "label": "yes"}],
    ),
    Case(
        "column that is not there",
        ("@data.jsonl: column_map maps prompt to column 'question', which does not exist; columns: prompt",),
        {"column_map": '{"prompt": "question"}'},
    ),
    Case(
        "fault in a part of a mixture",
        ("@b.jsonl, row 1: label is 3 (an integer)",),
        {"dataset_name": None, "dataset_mixture": '{"@data.jsonl": 1, "@b.jsonl": 2}'},
        files={"b.jsonl": '{"prompt": "a", "completion": "b", "label": 3}\n'},
    ),
    Case(
        "image in a message",
        ("@data.jsonl, row 1: prompt[0].content[0] has type 'image'", "only text"),
        data=[{**CHAT, "prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}] * 4,
    ),
    Case(
        "no chat template",
        ("@data.jsonl, row 1: the row is conversational", "no chat template", "tokenizer.chat_template"),
        data=[CHAT] * 4,
        model="no-template",
    ),
    Case(
        "fewer rows than a window",
        ("@data.jsonl: the 8 rows do not fill a window of 16", "dataloader_drop_last"),
        {"dataloader_drop_last": "true", "gradient_accumulation_steps": "4"},
    ),
]

MODEL = [
    Case(
        "missing model", ("model_name_or_path: folder '@nowhere' does not exist",), {"model_name_or_path": "@nowhere"}
    ),
    Case("torn weights", ("model_name_or_path: ", "model.safetensors is truncated or corrupt"), model="torn"),
    Case("missing shard", ("model_name_or_path: ", "2.safetensors is listed in", "missing"), model="missing-shard"),
    Case("no weights", ("model_name_or_path: ", "contains no weights"), model="no-weights"),
    Case("torn tokenizer", ("processing_class: ", "no tokenizer could be loaded"), model="torn-tokenizer"),
    Case("encoder-decoder", ("model_name_or_path: ", "encoder-decoder", "decoder-only"), model="encoder-decoder"),
    Case(
        "no tokenizer",
        ("processing_class: no tokenizer could be loaded", "the folder contains no tokenizer.json"),
        model="no-tokenizer",
    ),
    Case("no configuration", ("model_name_or_path: ", "the folder contains no config.json"), model="no-config"),
    Case("model is a file", ("model_name_or_path: ", "it is a file; set the folder"), model="good/model.safetensors"),
    Case(
        "model that is not cached",
        ("model_name_or_path: ", "the Hub cannot be reached; check the name, or run `hf download nobody/nothing`"),
        {"model_name_or_path": "nobody/nothing"},
    ),
    Case(
        "full model as adapter",
        ("adapter_name_or_path: ", "is a full model, not an adapter; set model_name_or_path to it"),
        {"adapter_name_or_path": "%good"},
    ),
    Case(
        "no such adapter",
        ("adapter_name_or_path: ", "the folder contains no adapter_config.json; check the path"),
        {"adapter_name_or_path": "@nowhere"},
    ),
    Case("small embedding", (f"{TOKENS} tokens", f"vocab_size is {TOKENS - 5}", "resize"), model="small-embedding"),
    Case(
        "longer than the model",
        (f"max_length: {POSITIONS + 1}", f"set max_length: {POSITIONS}"),
        {"max_length": str(POSITIONS + 1)},
    ),
]

DEEPSPEED = [
    deepspeed_case(
        "dotted key",
        {"zero_optimization.stage": 3},
        "@deepspeed.json: zero_optimization.stage=3: no such key",
    ),
    deepspeed_case(
        "contradicting key",
        {"gradient_accumulation_steps": 7, "zero_optimization": {"stage": 2}},
        "@deepspeed.json: gradient_accumulation_steps=7 contradicts gradient_accumulation_steps=1",
    ),
    deepspeed_case(
        "stage 2 reference",
        {"zero_optimization": {"stage": 2}},
        "@ref_deepspeed.json: zero_optimization.stage=2: a frozen model requires stage 3",
        key="ref_deepspeed",
    ),
    Case("no such deepspeed file", ("'zero9': no such file", "zero2"), {"deepspeed": "zero9"}),
]

OUTPUT = [
    Case("output is a file", ("output_dir: @out is not a folder",), files={"out": "text"}),
    Case("output not writable", ("output_dir: /proc/out cannot be written",), {"output_dir": "/proc/out"}),
    Case("output not empty", ("output_dir: @out is not empty", "overwrite_output_dir"), files={"out/old": "text"}),
]

COMMANDS = [*OPTIONS, *DATA, *MODEL, *DEEPSPEED, *OUTPUT, *ONLINE]


def write_models(folder: Path) -> Path:
    """Write models to ``folder`` and return it: ``good``, and copies of it with one defect each."""
    make_model(folder / "good")
    write_classifiers(folder)

    def copy(name: str, *without: str) -> Path:
        return Path(shutil.copytree(folder / "good", folder / name, ignore=shutil.ignore_patterns(*without)))

    char_tokenizer().save_pretrained(copy("no-template", "token*", "chat_template*"))
    weights = copy("torn") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    index = "model.safetensors.index.json"
    (copy("missing-shard") / index).write_text(json.dumps({"weight_map": {"a": "2.safetensors"}}))
    copy("no-weights", "*.safetensors")
    copy("no-config", "config.json")
    (copy("torn-tokenizer") / "tokenizer.json").write_text('{"version": ')
    T5Config().save_pretrained(copy("encoder-decoder", "config.json"))
    copy("no-tokenizer", "token*", "chat_template*", "special*")
    changed: dict[str, dict[str, Any]] = {
        "small-embedding": {"vocab_size": TOKENS - 5},
        "more-layers": {"num_hidden_layers": 3},
        "wider": {"intermediate_size": 96},
    }
    for name, values in changed.items():
        config = copy(name) / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **values}))
    return folder


def command(case: Case, folder: Path, models: Path) -> list[str]:
    """Write the case's files to ``folder`` and return the arguments of its command."""
    if case.arguments is not None:
        return [in_folder(argument, folder) for argument in case.arguments]
    rows = case.data if case.data is not None else (unpaired_rows if case.method == "kto" else paired_rows)(8)
    data = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    for name, content in {"data.jsonl": data, **case.files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    options: dict[str, Any] = {
        "method": case.method,
        "model_name_or_path": models / case.model,
        "dataset_name": "@data.jsonl",
        "output_dir": "@out",
        "max_length": POSITIONS,
        "max_prompt_length": None if case.method == "online_dpo" else "none",
        "per_device_train_batch_size": 4,
        "max_steps": 1,
        **case.options,
    }
    recipe = options.pop("recipe", None)
    given = [(f"--{name}", str(value)) for name, value in options.items() if value is not None]
    arguments = [*([recipe] if recipe else []), *(part for pair in given for part in pair)]
    return [in_folder(argument, folder).replace("%", f"{models}/") for argument in arguments]


def in_folder(text: str, folder: Path) -> str:
    """Replace ``@name`` with a path in ``folder``."""
    return text.replace("@", f"{folder}/")
