"""Small byte-level tokenizers with the special tokens and the chat template of a family."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tools.trl.hub import templates

VOCABULARY = 1000


@dataclass(frozen=True)
class Family:
    """The common properties of a family's tokenizers.

    Attributes:
        eos: token that ends a completion.
        pad: None if the family has none.
        bos: None if the family has none.
        template: chat template; None if the family has none.
        others: further special tokens.
        starts: whether ``bos`` is added before every text.
    """

    eos: str
    pad: str | None = None
    bos: str | None = None
    template: str | None = None
    others: tuple[str, ...] = field(default=())
    starts: bool = False

    def specials(self) -> list[str]:
        """All special tokens, without duplicates."""
        return list(dict.fromkeys(token for token in (self.pad, self.bos, self.eos, *self.others) if token))


_CHATML = ("<|im_start|>", "<|im_end|>")
FAMILIES: dict[str, Family] = {
    "qwen": Family("<|im_end|>", "<|endoftext|>", None, templates.CHATML, _CHATML),
    "qwen3": Family("<|im_end|>", "<|endoftext|>", None, templates.CHATML_MARKED, _CHATML),
    "llama3": Family(
        "<|eot_id|>",
        None,
        "<|begin_of_text|>",
        templates.LLAMA3,
        ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
        starts=True,
    ),
    "mistral": Family("</s>", None, "<s>", templates.MISTRAL, ("<unk>",), starts=True),
    "gemma": Family("<eos>", "<pad>", "<bos>", templates.GEMMA, ("<start_of_turn>", "<end_of_turn>"), starts=True),
    "neox": Family("<|endoftext|>", None, "<|endoftext|>"),
    "phi3": Family("<|endoftext|>", "<|endoftext|>", "<s>", templates.PHI3, ("<|user|>", "<|assistant|>", "<|end|>")),
    "harmony": Family(
        "<|return|>",
        "<|endoftext|>",
        "<|startoftext|>",
        templates.HARMONY,
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
    ),
}


def train(family: Family, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of the family, deterministically.

    Args:
        family: special tokens and chat template.
        texts: the training texts.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=family.specials(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if family.starts and family.bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, tokenizer.token_to_id(family.bos))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=family.eos,
        bos_token=family.bos,
        pad_token=family.pad,
        model_max_length=32768,
    )
    fast.chat_template = family.template
    return fast
