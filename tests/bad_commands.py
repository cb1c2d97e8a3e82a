"""Invalid commands for ``test_bad_input``; those of Online DPO and reward models are in ``bad_online_commands``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from bad_case import CHAT, Case, deepspeed_case
from bad_online_commands import ONLINE, write_classifiers
from data_tokenizers import char_tokenizer
from helpers import POSITIONS, make_model, paired_rows, unpaired_rows
from transformers import T5Config

TOKENS = len(char_tokenizer())
UNLABELED = [{"prompt": "ab", "completion": "cd"}] * 4
IDENTICAL = {"chosen": "the same", "rejected": "the same"}


OPTIONS = [
    Case("unknown option", ("learning_rte='1e-4'", "did you mean 'learning_rate'"), {"learning_rte": "1e-4"}),
    Case("wrong type", ("learning_rate='fast'", "a number"), {"learning_rate": "fast"}),
    Case("unknown loss", ("loss_type='ktoo'", "kto, apo_zero_unpaired"), {"loss_type": "ktoo"}),
    Case("other method's loss", ("loss_type='simpo'", "kto, apo_zero_unpaired"), {"loss_type": "simpo"}),
    Case("beta of zero", ("beta=0:", "greater than 0"), {"beta": "0"}),
    Case("negative beta", ("beta=-0.5", "greater than 0"), {"beta": "-0.5"}, method="cpo"),
    Case("empty batch", ("per_device_train_batch_size=0", "at least 1"), {"per_device_train_batch_size": "0"}),
    Case("other method's option", ("simpo_gamma='1'", "of method cpo"), {"simpo_gamma": "1"}),
    Case("unknown method", ("method='ppo'", "unknown method"), {"method": "ppo"}),
    Case("option to come", ("activation_offloading=True", "not supported yet"), {"activation_offloading": "true"}),
    Case("rank without adapters", ("lora_r=8", "set use_peft: true"), {"lora_r": "8"}),
    Case("4 bits without adapters", ("4-bit weights cannot be trained", "use_peft"), {"load_in_4bit": "true"}),
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
        "precomputed without a reference",
        ("ref_placement='precomputed': CPO does not use a reference model",),
        {"ref_placement": "precomputed"},
        method="cpo",
    ),
    Case(
        "precomputed completions",
        ("ref_placement='precomputed': Online DPO scores completions that are generated",),
        {"ref_placement": "precomputed"},
        method="online_dpo",
    ),
    Case(
        "two placements",
        ("precompute_ref_log_probs=True and ref_placement='replica'", "remove one of them"),
        {"precompute_ref_log_probs": "true", "ref_placement": "replica"},
    ),
    Case(
        "batch of nothing precomputed",
        ("precompute_ref_batch_size=4: has no effect",),
        {"precompute_ref_batch_size": "4"},
    ),
    Case("resuming", ("resume_from_checkpoint='@out'", "no such folder"), {"resume_from_checkpoint": "@out"}),
    Case(
        "resuming from what is moved away",
        ("resume_from_checkpoint='latest'", "overwrite_output_dir"),
        {"resume_from_checkpoint": "latest", "overwrite_output_dir": "true"},
    ),
    Case("two formats", ("bf16=True and fp16=True",), {"bf16": "true", "fp16": "true"}),
    Case(
        "argument of another option",
        ("model_init_kwargs={'torch_dtype': 'bfloat16'}", "dtype='float32'"),
        {"model_init_kwargs": '{"torch_dtype": "bfloat16"}', "dtype": "float32"},
    ),
    Case(
        "unknown argument of checkpointing",
        ("gradient_checkpointing_kwargs={'reentrant': True}", "did you mean 'use_reentrant'"),
        {"gradient_checkpointing_kwargs": '{"reentrant": true}'},
    ),
    Case("unknown argument of the optimizer", ("optim_args: 'foo=1'", "'adamw_torch'"), {"optim_args": "foo=1"}),
    Case(
        "unknown argument of the schedule",
        ("lr_scheduler_type 'cosine'", "lr_scheduler_kwargs {'foo': 1}"),
        {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": '{"foo": 1}'},
    ),
    Case("no data set", ("dataset_name is required", "set it to a file"), {"dataset_name": None}),
    Case("no model", ("model_name_or_path is required", "set it to a folder"), {"model_name_or_path": None}),
    Case("no evaluation data", ("eval_strategy='steps'", "set dataset_test_split"), {"eval_strategy": "steps"}),
    Case(
        "window of one row",
        ("gradient_accumulation_steps=1", "per_device_train_batch_size=1", "to 2 or more (16 recommended)"),
        {"per_device_train_batch_size": "1", "gradient_accumulation_steps": "1"},
    ),
    Case(
        "unknown option in a recipe",
        ("@recipe.yaml", "betta=0.1", "did you mean 'beta'"),
        {"recipe": "@recipe.yaml"},
        files={"recipe.yaml": "method: kto\ntraining:\n  betta: 0.1\n"},
    ),
]

DATA = [
    Case(
        "missing file",
        ("@absent.jsonl", "file or folder does not exist", "dataset_name"),
        {"dataset_name": "@absent.jsonl"},
    ),
    Case("torn file", ("@data.jsonl, line 3: invalid JSON",), data='{"prompt": "a"}\n\n{"prompt": "b", "compl'),
    Case("empty file", ("@data.jsonl", "contains no rows"), data=""),
    Case("missing split", ("@data.jsonl", "split 'test' does not exist", "train"), {"dataset_test_split": "test"}),
    Case(
        "cpo on unpaired",
        ("CPO requires chosen and rejected", "completion, label"),
        data=unpaired_rows(4),
        method="cpo",
    ),
    Case("kto without labels", ("missing column label", "prompt, completion"), data=UNLABELED),
    Case(
        "label is a text",
        ("@data.jsonl, line 5: label is 'yes' (a string)", "true or false"),
        data=[*unpaired_rows(4), {"prompt": "ab", "completion": "cd", "label": "yes"}],
    ),
    Case(
        "labels are numbers",
        ("@data.jsonl, row 1: label is 1 (an integer)", "true or false"),
        data=[{"prompt": "ab", "completion": "cd", "label": 1}] * 4,
    ),
    Case(
        "content is a number",
        ("@data.jsonl, line 2: prompt[0].content is 7 (an integer)", "string"),
        data=[CHAT, {**CHAT, "prompt": [{"role": "user", "content": 7}]}],
    ),
    Case(
        "nothing left",
        ("@data.jsonl: all 3 rows were dropped (3 × ", "identical"),
        data=[IDENTICAL] * 3,
        method="cpo",
    ),
    Case(
        "column that is not there",
        ("@data.jsonl: column_map maps prompt to column 'question', which does not exist; columns: prompt",),
        {"column_map": '{"prompt": "question"}'},
    ),
    Case(
        "inverted column map",
        ("column_map={'instruction': 'prompt'}", "{prompt: instruction}"),
        {"column_map": '{"instruction": "prompt"}'},
    ),
    Case(
        "mixture beside a dataset",
        ("dataset_name='@data.jsonl'", "dataset_mixture is set as well"),
        {"dataset_mixture": '{"a.jsonl": 1}'},
    ),
    Case(
        "mixture with a missing part",
        ("@b.jsonl: file or folder does not exist",),
        {"dataset_name": None, "dataset_mixture": '{"@data.jsonl": 1, "@b.jsonl": 2}'},
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
        "strict data",
        ("@data.jsonl: 2 of 6 rows would be dropped (2 × ", "strict_data"),
        {"strict_data": "true"},
        data=[*paired_rows(4), IDENTICAL, IDENTICAL],
        method="cpo",
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
    Case(
        "missing reference",
        ("ref_model_name_or_path: folder '@nowhere' does not exist",),
        {"ref_model_name_or_path": "@nowhere"},
    ),
    Case("torn weights", ("model_name_or_path: ", "model.safetensors is truncated or corrupt"), model="torn"),
    Case(
        "torn older weights", ("model_name_or_path: ", "pytorch_model.bin is truncated or corrupt"), model="torn-older"
    ),
    Case(
        "torn index",
        ("model_name_or_path: ", "model.safetensors.index.json is truncated or corrupt"),
        model="torn-index",
    ),
    Case("missing shard", ("model_name_or_path: ", "2.safetensors is listed in", "missing"), model="missing-shard"),
    Case("no weights", ("model_name_or_path: ", "contains no weights"), model="no-weights"),
    Case("torn configuration", ("model_name_or_path: ", "the configuration of "), model="torn-config"),
    Case("wrong configuration", ("model_name_or_path: ", "'hidden_size' expected int"), model="wrong-config"),
    Case("torn tokenizer", ("processing_class: ", "no tokenizer could be loaded"), model="torn-tokenizer"),
    Case("encoder-decoder", ("model_name_or_path: ", "encoder-decoder", "decoder-only"), model="encoder-decoder"),
    Case("no tokenizer", ("processing_class: ", "no tokenizer could be loaded"), model="no-tokenizer"),
    Case("small embedding", (f"{TOKENS} tokens", f"vocab_size is {TOKENS - 5}", "resize"), model="small-embedding"),
    Case(
        "small embedding of the reference",
        (f"{TOKENS} tokens", f"small-embedding's vocab_size is {TOKENS - 5}"),
        {"ref_model_name_or_path": "%small-embedding"},
    ),
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
        "@deepspeed.json: zero_optimization.stage=3: DeepSpeed ignores dotted keys; write {",
    ),
    deepspeed_case(
        "unknown key",
        {"zero_optimisation": {"stage": 3}},
        "@deepspeed.json: zero_optimisation={'stage': 3}",
        "did you mean 'zero_optimization'",
    ),
    deepspeed_case(
        "contradicting key",
        {"gradient_accumulation_steps": 7, "zero_optimization": {"stage": 2}},
        "@deepspeed.json: gradient_accumulation_steps=7 contradicts gradient_accumulation_steps=1",
    ),
    deepspeed_case(
        "contradicting format",
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
        "bf16.enabled=true in the DeepSpeed JSON: contradicts dtype='float32'",
        dtype="float32",
    ),
    deepspeed_case(
        "wrong value", {"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}, "reduce_bucket_size='big'"
    ),
    deepspeed_case(
        "stage 2 reference",
        {"zero_optimization": {"stage": 2}},
        "@ref_deepspeed.json: zero_optimization.stage=2: a frozen model requires stage 3",
        key="ref_deepspeed",
    ),
    Case("no such deepspeed file", ("'zero9': no such file", "zero2"), {"deepspeed": "zero9"}),
    Case(
        "torn deepspeed file",
        ("@deepspeed.json, line 2: invalid JSON",),
        {"deepspeed": "@deepspeed.json"},
        files={"deepspeed.json": '{\n"zero_optimization": '},
    ),
]

OUTPUT = [
    Case("output is a file", ("output_dir: @out is not a folder",), files={"out": "text"}),
    Case(
        "output below a file",
        ("output_dir: @file is not a folder",),
        {"output_dir": "@file/out"},
        files={"file": "text"},
    ),
    Case("output not writable", ("output_dir: /proc/out cannot be written",), {"output_dir": "/proc/out"}),
    Case("output not empty", ("output_dir: @out is not empty", "overwrite_output_dir"), files={"out/old": "text"}),
]

CASES = [*OPTIONS, *DATA, *MODEL, *DEEPSPEED, *OUTPUT, *ONLINE]


def write_models(folder: Path) -> Path:
    """Write models to ``folder`` and return it: ``good``, and copies of it with one defect each."""
    make_model(folder / "good")
    write_classifiers(folder)

    def copy(name: str, *without: str) -> Path:
        return Path(shutil.copytree(folder / "good", folder / name, ignore=shutil.ignore_patterns(*without)))

    char_tokenizer().save_pretrained(copy("no-template", "token*", "chat_template*"))
    weights = copy("torn") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    older = copy("torn-older", "*.safetensors") / "pytorch_model.bin"
    torch.save({"weight": torch.zeros(500)}, older)
    older.write_bytes(older.read_bytes()[:-100])
    index = "model.safetensors.index.json"
    (copy("torn-index") / index).write_text('{"weight_map": {"a": ')
    (copy("missing-shard") / index).write_text(json.dumps({"weight_map": {"a": "2.safetensors"}}))
    copy("no-weights", "*.safetensors")
    (copy("torn-config") / "config.json").write_text('{"model_type": ')
    (copy("torn-tokenizer") / "tokenizer.json").write_text('{"version": ')
    T5Config().save_pretrained(copy("encoder-decoder", "config.json"))
    copy("no-tokenizer", "token*", "chat_template*", "special*")
    changed: dict[str, dict[str, Any]] = {
        "small-embedding": {"vocab_size": TOKENS - 5},
        "wrong-config": {"hidden_size": "big"},
        "more-layers": {"num_hidden_layers": 3},
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
