"""Small byte-level tokenizers with the special tokens and a minimal chat template of a family."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 1000
_TOOLS = (
    "{%- if tools %}{{ OPENING + 'Tools:' }}{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{%- endfor %}"
    "{{ CLOSING }}{%- endif %}"
)
_CALLS = (
    "{%- if message.tool_calls %}{%- for call in message.tool_calls %}"
    "{%- set call = call.function if call.function else call %}"
    "{{ '<tool_call>\\n' + ({'name': call.name, 'arguments': call.arguments} | tojson) + '\\n</tool_call>' }}"
    "{%- endfor %}{%- endif %}"
)


def _turns(opening: str, closing: str, *, first: str = "''", generation: bool = False, system: str = "") -> str:
    """Build a template of turns: ``opening`` (an expression with ``role``), the content, ``closing``.

    ``first`` is an expression for the start, ``system`` the default message of the system.
    """
    text = "{%- if message.content %}{{ message.content }}{%- endif %}" + _CALLS + f"{{{{ {closing} }}}}"
    if generation:
        answer = f"{{%- if message.role == 'assistant' %}}{{% generation %}}{text}{{% endgeneration %}}"
        text = f"{answer}{{%- else %}}{text}{{%- endif %}}"
    if system:
        system = f"{{%- set role = 'system' %}}{{{{ {opening} + '{system}' + {closing} }}}}"
        system = f"{{%- if messages[0].role != 'system' %}}{system}{{%- endif %}}"
    tools = _TOOLS.replace("OPENING", opening.replace("role", "'system'")).replace("CLOSING", closing)
    return (
        f"{{{{ {first} }}}}{system}{tools}{{%- for message in messages %}}{{%- set role = message.role %}}"
        f"{{{{ {opening} }}}}{text}{{%- endfor %}}"
        f"{{%- if add_generation_prompt %}}{{%- set role = 'assistant' %}}{{{{ {opening} }}}}{{%- endif %}}"
    )


_CHATML_TURN = ("'<|im_start|>' + role + '\\n'", "'<|im_end|>\\n'")
CHATML = _turns(*_CHATML_TURN, system="You are a helpful assistant.")
CHATML_MARKED = _turns(*_CHATML_TURN, generation=True)
_HEADER = "'<|start_header_id|>' + role + '<|end_header_id|>\\n\\n'"
LLAMA3 = _turns(_HEADER, "'<|eot_id|>'", first="bos_token", generation=True)
MISTRAL = (
    "{{ bos_token }}{%- for message in messages %}{%- if message.role == 'assistant' %}"
    "{{ ' ' + message.content + eos_token }}{%- else %}{{ '[INST] ' + message.content + ' [/INST]' }}{%- endif %}"
    "{%- endfor %}"
)
HARMONY = (
    "{{ '<|start|>system<|message|>' + (model_identity or 'You are a small model.') + '\\nReasoning: ' "
    "+ (reasoning_effort or 'medium') + '<|end|>' }}"
    "{%- for message in messages %}{%- if message.role == 'assistant' %}{% generation %}"
    "{%- if message.thinking %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + (message.content or '') "
    "+ ('<|return|>' if loop.last else '<|end|>') }}{% endgeneration %}"
    "{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{%- endif %}"
)


@dataclass(frozen=True)
class Family:
    """The special tokens and the chat template of a family; None for what it lacks.

    ``eos`` ends a completion; ``starts`` says whether ``bos`` is added before every text.
    """

    eos: str
    pad: str | None = None
    bos: str | None = None
    template: str | None = None
    others: tuple[str, ...] = ()
    starts: bool = False


_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
FAMILIES: dict[str, Family] = {
    "qwen": Family("<|im_end|>", "<|endoftext|>", None, CHATML, _CHATML),
    "qwen3": Family("<|im_end|>", "<|endoftext|>", None, CHATML_MARKED, _CHATML),
    "llama3": Family("<|eot_id|>", None, "<|begin_of_text|>", LLAMA3, _LLAMA3, starts=True),
    "mistral": Family("</s>", None, "<s>", MISTRAL, ("<unk>",), starts=True),
    "neox": Family("<|endoftext|>", None, "<|endoftext|>"),
    "harmony": Family("<|return|>", "<|endoftext|>", "<|startoftext|>", HARMONY, _HARMONY),
}


def train(family: Family, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of the family on texts, deterministically."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*dict.fromkeys(filter(None, (family.pad, family.bos, family.eos, *family.others)))],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if family.starts and family.bos:
        bos = (family.bos, tokenizer.token_to_id(family.bos))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    named = {"eos_token": family.eos, "bos_token": family.bos, "pad_token": family.pad}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32768, **named)
    fast.chat_template = family.template
    return fast
