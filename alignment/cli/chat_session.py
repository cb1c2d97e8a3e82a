"""What ``chat`` does after its arguments are parsed: load the models, read messages, and have them answered."""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel, TextStreamer

from alignment.checkpoint.saving import no_progress_bar
from alignment.checkpoint.trained_model import TrainedModel, find_model
from alignment.config.errors import AlignmentError, OptionError
from alignment.data.messages import Source
from alignment.data.tokenization import RowTokenizer
from alignment.engines.collectives import device
from alignment.internals.peft import computing_with
from alignment.rollout.processors import generation_config, neutral_defaults
from alignment.run.ending import write
from alignment.training.sampling import sampling_of

_COMMANDS = """\
/reset       start a new conversation
/regenerate  answer the last message again, with another seed
/quit        end the command, as Ctrl-D does"""
_Turns: TypeAlias = list[dict[str, str]]


class _Speaker:
    """A model that answers, with its adapter or without it. Without a chat template, each message is a prompt."""

    def __init__(self, found: TrainedModel, model: PreTrainedModel, tokenizer: Any, given: Namespace) -> None:
        self.found, self.model, self.rows = found, model, RowTokenizer(tokenizer)
        self.heading = "" if given.compare is None else f"== {found.found} ==\n"
        own = sampling_of(model.generation_config, tokenizer, given.sampling["max_new_tokens"])
        ends = [token for token in (*own.eos_token_ids, self.rows.end_of_turn) if token is not None]
        self.sampling = replace(own, eos_token_ids=tuple(ends), **given.sampling)

    def answer(self, turns: _Turns, message: str, seed: int) -> _Turns:
        """Print an answer to the message, which Ctrl-C ends, and return the conversation with both."""
        turns = [*turns, {"role": "user", "content": message}]
        prompt = turns if self.rows.tokenizer.chat_template else message
        ids = self.rows.encode([Source(prompt, (), "the conversation")])[0].prompt
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        if (room := positions - len(ids)) < 1:
            raise OptionError(f"{len(ids)} tokens fill the positions of {self.found.found}; use /reset")
        config = generation_config(replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, room)))
        given = torch.tensor([ids], device=self.model.device)
        streamer = _Streamer(self.rows.tokenizer, True, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        torch.manual_seed(seed)
        print(end=self.heading, flush=True)
        try:
            with neutral_defaults(self.model), computing_with(self.model, "default" if self.found.adapter else None):
                self.model.generate(given, config, attention_mask=torch.ones_like(given), streamer=streamer)
        except KeyboardInterrupt:
            streamer.end()
        return [*turns, {"role": "assistant", "content": streamer.text}]


class _Streamer(TextStreamer):
    """Prints an answer as it is generated, and keeps it."""

    text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        super().on_finalized_text(text, stream_end)


def chat(given: Namespace) -> None:
    """Load the models, and answer the lines of stdin until its end or ``/quit``; without a terminal, raise errors."""
    seed, in_terminal = given.sampling.pop("seed"), sys.stdin.isatty() and sys.stdout.isatty()
    speakers = _speakers(given)
    conversations = start = [[{"role": "system", "content": given.system}] if given.system else []] * len(speakers)
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    if in_terminal:
        import readline  # noqa: F401 - line editing and history for input()

        signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C no longer ends the command
        write(f"Type a message, or a command:\n{_COMMANDS}")
    while True:
        try:
            message, before = input("> " if in_terminal else "").strip(), conversations
            if message == "/regenerate" and before is not start:
                message, before = before[0][-2]["content"], [turns[:-2] for turns in before]
            if message == "/quit":
                return
            if message == "/reset":
                conversations = start
            elif message.startswith("/") and len(message.split()) == 1:
                write(_COMMANDS)
            elif message:
                conversations = [one.answer(turns, message, seed) for one, turns in zip(speakers, before)]
                seed += 1
        except EOFError:
            return print(end="\n" if in_terminal else "")
        except (AlignmentError, KeyboardInterrupt) as error:
            if not in_terminal:
                raise
            print(f"error: {error}" if str(error) else "", file=sys.stderr)


def _speakers(given: Namespace) -> list[_Speaker]:
    """Load the model and the one it is compared with, if any; an adapter and its own base share the weights."""
    models = [find_model(given.run, "RUN", base=given.base, trust=given.trust_remote_code)]
    if given.compare is not None:
        named = find_model(given.compare, "compare", trust=given.trust_remote_code) if given.compare else None
        if (other := named or models[0].start()) is None:
            raise OptionError(f"compare: {given.run} does not tell which model it was trained from; name it")
        models.append(other)
    speakers, template = list[_Speaker](), None
    for found in models:
        tokenizer = found.tokenizer()
        template = (tokenizer.chat_template or template) if given.apply_chat_template == "true" else None
        tokenizer.chat_template = template
        if given.system and not template:
            raise OptionError(f"system={given.system!r}: only a chat template has a place for it; remove it")
        shared = bool(speakers) and found == replace(models[0], found=found.found, adapter=None, options=found.options)
        with no_progress_bar():
            model = speakers[0].model if shared else found.load(torch.device("cpu") if given.use_cpu else device())
        plain = "" if template else "; without a chat template, each message is a prompt of its own"
        write(f"{found.found}: {model.dtype} on {model.device}{plain}")
        speakers.append(_Speaker(found, model, tokenizer, given))
    return speakers
