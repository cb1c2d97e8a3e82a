"""Configurations by which memory plans are judged: each follows from a seed, see ``data/memory_cases.jsonl``.

The file has 24 seeds and, for the reader, what follows from them. ``python -m support.memory_cases``, called in
``tests/``, writes it: from the seeds below 10,000 it takes, one after another, the one with the most new pairs of
values. No measurement and no plan takes part in the choice. The architectures in :data:`HELD_OUT` must not be used to
develop a plan.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from support.data_tokenizers import char_tokenizer

FILE = Path(__file__).resolve().parents[1] / "data" / "memory_cases.jsonl"
COUNT = 24
CORE = ("method", "training", "stage", "ranks", "dtype", "checkpointing")  # their pairs count three times
HELD_OUT = ("gemma2", "gemma3_text", "mixtral", "qwen3_moe")
FACTORS: dict[str, tuple[Any, ...]] = {
    "method": ("KTO", "CPO", "DPO", "OnlineDPO", "SFT", "Reward"),
    "training": ("full", "lora", "4-bit"),
    "stage": (0, 1, 2, 3),
    "ranks": (1, 2),
    "dtype": ("float32", "bfloat16"),
    "checkpointing": ("none", "half", "all"),
    "packed": (True, False),
    "length": (128, 256, 512, 1024),
    "architecture": ("llama", "qwen2", "qwen3", "mistral", "phi", "gpt2", *HELD_OUT),
}
_PAIRED = ("CPO", "DPO", "OnlineDPO", "Reward")
_TOKENS = 1024  # maximum number of tokens of a micro-batch, so that a measurement takes seconds
_GENERATED = 256  # maximum length of a sequence that is generated
_SHORT = 4  # tokens of a prompt
_FIRST, _LAST = 5, 50  # token IDs of letters


@dataclass(frozen=True)
class MemoryCase:
    """A run: its values of :data:`FACTORS`, and sizes.

    Attributes:
        rows: number of rows of a micro-batch. Each sequence has ``length`` tokens, prompt included, the most that the
            options allow: a plan is that of the largest micro-batch.
        prompt: tokens of each prompt.
        hidden, layers, vocabulary, tied: sizes of the model.
    """

    seed: int
    method: str
    training: str
    stage: int
    ranks: int
    dtype: str
    checkpointing: str
    packed: bool
    length: int
    architecture: str
    rows: int
    prompt: int
    hidden: int
    layers: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, seed: int) -> MemoryCase:
        """Return the case that follows from a seed."""
        rng = random.Random(seed)
        drawn = {name: rng.choice(values) for name, values in FACTORS.items()}
        sequences = 2 if drawn["method"] in _PAIRED else 1
        longest = _GENERATED if drawn["method"] == "OnlineDPO" else _TOKENS // sequences
        drawn["length"] = length = min(drawn["length"], longest)
        drawn["stage"] = min(drawn["stage"], 2 if drawn["training"] == "4-bit" else 3)
        most = _TOKENS // (length * sequences)
        rows = rng.randint((most + 1) // 2, most)
        prompt = rng.randint(length // 8, length // 2)
        return cls(
            seed=seed,
            **drawn,
            rows=rows,
            # Packed pairs share their prompt, so that their micro-batch is only the largest if it is short.
            prompt=_SHORT if drawn["packed"] and sequences > 1 else prompt,
            hidden=rng.choice((128, 192, 256)),
            layers=rng.randint(4, 8),
            vocabulary=rng.choice((2048, 4096, 8192, 32768)),
            tied=rng.random() < 0.5,
        )

    @property
    def name(self) -> str:
        """A name for tests and folders."""
        return f"{self.seed}-{self.architecture}-{self.method}-{self.training}-zero{self.stage}"

    @property
    def completion(self) -> int:
        """Tokens of each completion."""
        return self.length - self.prompt

    @property
    def scored(self) -> float:
        """The share of a sequence's tokens, without the first, that is scored."""
        if self.method == "Reward":
            return 1 / (self.length - 1)
        return 1.0 if self.method == "SFT" else self.completion / (self.length - 1)

    @property
    def checkpointed(self) -> int:
        """The number of layers that are recomputed in the backward pass: the first ones."""
        return {"none": 0, "half": self.layers // 2, "all": self.layers}[self.checkpointing]

    def config(self) -> PretrainedConfig:
        """Return the configuration of its model."""
        heads, hidden = 8, self.hidden
        sizes: dict[str, Any] = {
            "vocab_size": self.vocabulary,
            "hidden_size": hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": 2,
            "intermediate_size": hidden * 11 // 4,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": self.tied,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": None,
        }
        own: dict[str, dict[str, Any]] = {
            "phi": {"num_key_value_heads": heads, "intermediate_size": 4 * hidden},
            "gpt2": {"num_key_value_heads": heads, "intermediate_size": 4 * hidden},
            "gemma2": {"head_dim": 32, "sliding_window": 256},
            "gemma3_text": {"head_dim": 32, "sliding_window": 256},
            "qwen3": {"head_dim": 32},
            "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": hidden},
            "qwen3_moe": {
                **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 2, "head_dim": 32},
                "norm_topk_prob": True,
            },
        }
        sizes |= own.get(self.architecture, {})
        if self.architecture == "gpt2":
            names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
            names |= {"max_position_embeddings": "n_positions"}
            sizes = {
                names.get(name, name): value for name, value in sizes.items() if name[:3] not in ("num", "int")
            } | {new: sizes[old] for old, new in names.items()}
            sizes |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        return AutoConfig.for_model(self.architecture, **sizes)

    def make_models(self, folder: Path) -> dict[str, str]:
        """Save a random policy, and with it a tokenizer; return the arguments of the trainer that name models.

        The file's dtype is not that of the run, so that weights are copied when they are loaded, as they are to a
        GPU; safetensors would map a file of the same dtype, whose memory is not counted.
        """
        config, stored = self.config(), torch.float32 if self.dtype == "bfloat16" else torch.bfloat16
        auto: Any = AutoModelForCausalLM
        if self.method == "Reward":
            auto, config.num_labels, config.pad_token_id = AutoModelForSequenceClassification, 1, 2
        torch.manual_seed(self.seed)
        auto.from_config(config, dtype=stored).save_pretrained(folder)
        char_tokenizer().save_pretrained(folder)
        return {"model": str(folder)}

    def dataset(self) -> list[dict[str, Any]]:
        """Return rows for two steps, tokenized, which differ in their tokens only."""
        rng = random.Random(self.seed)

        def ids(count: int) -> list[int]:
            return [rng.randrange(_FIRST, _LAST) for _ in range(count)]

        made = []
        for number in range(4 * self.rows * self.ranks):
            prompt, chosen, rejected = ids(self.prompt), ids(self.completion), ids(self.completion)
            if self.method == "OnlineDPO":
                made.append({"prompt": "".join(rng.choices("cdefgh", k=self.prompt))})  # a token per letter
            elif self.method == "KTO":
                made.append({"prompt_ids": prompt, "completion_ids": chosen, "label": number % 2 == 0})
            elif self.method == "SFT":
                made.append({"input_ids": prompt + chosen})
            elif self.method == "Reward":
                made.append({"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected})
            else:
                made.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
        return made

    def options(self, folder: Path, **more: Any) -> dict[str, Any]:
        """Return the options of the run: two steps of two micro-batches, with an evaluation."""
        zero: dict[str, Any] = {"stage": self.stage}
        if self.stage:  # in proportion to the model, as the defaults are to models of 8e9 parameters
            zero |= {"reduce_bucket_size": 400_000, "allgather_bucket_size": 400_000}
        if self.stage == 3:
            zero |= {"stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 200_000}
            zero |= {"stage3_max_live_parameters": 2_000_000, "stage3_max_reuse_distance": 2_000_000}
        options: dict[str, Any] = {
            "output_dir": str(folder / "out"),
            "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": 2,
            "max_steps": 2,
            "learning_rate": 1e-4,
            "max_length": self.length,
            "dtype": self.dtype,
            "pack": "auto" if self.packed else "false",
            "gradient_checkpointing": self.checkpointing != "none",
            "deepspeed": {"zero_optimization": zero},
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        if self.training != "full":
            options |= {"use_peft": True, "lora_r": 8, "lora_dropout": 0.0, "load_in_4bit": self.training == "4-bit"}
        if self.method == "OnlineDPO":
            options |= {"max_new_tokens": self.completion, "rollout_batch_size": 2 * self.rows}
            options |= {"reward_funcs": f"{Path(__file__).parent / 'drivers' / 'memory_runs.py'}:reward"}
        return options | more


def cases() -> list[MemoryCase]:
    """Return the cases of the file, which must be those that follow from its seeds."""
    return [MemoryCase.of(json.loads(line)["seed"]) for line in FILE.read_text().splitlines()]


def _pairs(case: MemoryCase) -> set[Any]:
    values = {name: value for name, value in dataclasses.asdict(case).items() if name in FACTORS}
    values["held out"] = case.architecture in HELD_OUT
    return set(itertools.combinations(values.items(), 2))


def _weight(pairs: set[Any]) -> int:
    return sum(3 if {name for name, _ in pair} <= set(CORE) else 1 for pair in pairs)


def chosen(seeds: Iterable[int]) -> list[MemoryCase]:
    """Return :data:`COUNT` cases, each the one with the most new pairs of values; a quarter has held-out models."""
    candidates = [MemoryCase.of(seed) for seed in seeds]
    found: list[MemoryCase] = []
    covered: set[Any] = set()
    for place in range(COUNT):
        held_out = place % 4 == 3
        allowed = [case for case in candidates if (case.architecture in HELD_OUT) is held_out]
        found.append(max(allowed, key=lambda case: _weight(_pairs(case) - covered)))
        covered |= _pairs(found[-1])
    return found


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(dataclasses.asdict(case)) + "\n" for case in chosen(range(10_000))))
