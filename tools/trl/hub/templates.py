"""Minimal chat templates for the tokenizer families of the local Hub."""

from __future__ import annotations

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


_CHATML = ("'<|im_start|>' + role + '\\n'", "'<|im_end|>\\n'")
CHATML = _turns(*_CHATML, system="You are a helpful assistant.")
CHATML_MARKED = _turns(*_CHATML, generation=True)
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
