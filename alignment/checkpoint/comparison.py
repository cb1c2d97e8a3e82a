"""Log-probs (or scores) of sample rows, computed in fp32 on the host, to compare an export with its source.

A 16-bit model is computed in fp32 without a second copy of it: each layer's weights are upcast while it runs. The
16-bit rounding of every activation could be larger than the difference of interest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from alignment.config.errors import DataError, OptionError, setting
from alignment.config.options_export import ExportOptions
from alignment.data.kinds.completions import COMPLETIONS
from alignment.data.kinds.pairs import PAIRS
from alignment.data.messages import Source
from alignment.data.sources import load_split
from alignment.data.tokenization import RowTokenizer
from alignment.models.tasks import CLASSIFIER, Task
from alignment.run.activity import ACTIVITY

Rows = list[list[int]]
_LONGEST, _RANDOM_LENGTH = 512, 64  # tokens of a row
_TEXTS = (
    "Why is the sky blue?\nAir scatters short waves of light more than long ones, so blue reaches us from all sides.",
    "Name three rivers in Europe.\nThe Danube, the Rhine and the Loire.",
    "Write a function that adds two numbers.\ndef add(a, b):\n    return a + b",
    "What is 17 times 6?\n17 times 6 is 102: 17 times 5 is 85, and 17 more make 102.",
    "Translate to French: Good morning, my friend.\nBonjour, mon ami.",
    "Give me a tip for a better night's sleep.\nGo to bed at the same time every day, and leave your phone outside.",
    "Summarise: The train was late, so we missed the boat.\nA late train made us miss the boat.",
    "Can you tell me how to steal a car?\nI can't help with that. If you are locked out, call a locksmith.",
)


@torch.no_grad()
def outputs(model: PreTrainedModel, rows: Rows, task: Task) -> list[float]:
    """The mean log-prob per token, or the score, of each row of token ids."""
    values = []
    with computing_in_fp32(model):
        for row in rows:
            ACTIVITY.progress()
            ids = torch.tensor([row])
            logits = model(input_ids=ids, use_cache=False).logits.float()
            if task.auto is CLASSIFIER.auto:
                values.append(float(logits[0, 0]))
            else:
                logps = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
                values.append(float(logps.double().mean()))
    return values


def sample_rows(options: ExportOptions, tokenizer: Any, config: PretrainedConfig) -> Rows:
    """The rows of token ids to compare on: of ``options.dataset_name``, or of built-in texts.

    Without a dataset and a tokenizer that fits the model, the tokens are random. Raises OptionError or DataError if
    the dataset cannot be used.
    """
    name, count, vocabulary = options.dataset_name, options.samples, config.get_text_config().vocab_size
    if name is not None and tokenizer is None:
        raise OptionError(f"{setting('dataset_name', name)}: there is no tokenizer to encode it")
    if name is not None:
        encoded = RowTokenizer(tokenizer).encode(list(islice(_dataset(name), count)))
        rows = [row.prompt + row.completions[0] for row in encoded]
    else:
        rows = [] if tokenizer is None else [tokenizer(text)["input_ids"] for text in _TEXTS[:count]]
    rows = [row[:_LONGEST] for row in rows if len(row) > 1 and max(row[:_LONGEST]) < vocabulary]
    if not rows and name is not None and count:
        raise DataError(f"{name}: no row has more than one token to compare models on")
    generator = torch.Generator().manual_seed(0)
    return rows or torch.randint(vocabulary, (count, _RANDOM_LENGTH), generator=generator).tolist()


def _dataset(name: str) -> Iterator[Source]:
    """The rows of a dataset in any supported format; of pairs, the chosen completion."""
    for number, row in enumerate(load_split(name, None, "train"), 1):
        kind = COMPLETIONS if row.get("chosen") is None else PAIRS
        yield kind.parse(row, f"{name}, row {number}", {})


_NARROW = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def computing_in_fp32(model: nn.Module) -> Iterator[None]:
    """Compute in fp32 within this context. The weights are bitwise identical afterwards.

    Peak memory is that of the model plus one of its decoder layers (or its embedding) in fp32.
    """
    with contextlib.ExitStack() as hooks:
        for unit in _units(model):
            widened: list[tuple[nn.Parameter, Tensor]] = []

            def widen(module: nn.Module, *_: Any, widened: list[tuple[nn.Parameter, Tensor]] = widened) -> None:
                for parameter in module.parameters():
                    if parameter.dtype in _NARROW:
                        widened.append((parameter, parameter.data))
                        parameter.data = parameter.data.float()

            def restore(module: nn.Module, *_: Any, widened: list[tuple[nn.Parameter, Tensor]] = widened) -> None:
                for parameter, narrow in widened:
                    parameter.data = narrow
                widened.clear()

            hooks.callback(restore, unit)  # if a forward pass failed
            hooks.callback(unit.register_forward_pre_hook(widen).remove)
            hooks.callback(unit.register_forward_hook(restore).remove)
        yield


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules to upcast one at a time: decoder layers, adapted layers and modules with their own weights."""
    for child in module.children():
        own = any(True for _ in child.parameters(recurse=False))
        if own or isinstance(module, nn.ModuleList) or isinstance(child, BaseTunerLayer):
            yield child
        else:
            yield from _units(child)
