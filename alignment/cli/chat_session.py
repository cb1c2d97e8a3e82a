"""What ``chat`` does after its arguments are parsed: load the models, read messages, and have them answered."""

from __future__ import annotations

import os
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, TextStreamer

from alignment.checkpoint.saving import no_progress_bar
from alignment.checkpoint.trained_model import find_model
from alignment.config.errors import AlignmentError, ModelError, OptionError
from alignment.data.messages import Source
from alignment.data.tokenization import RowTokenizer
from alignment.internals.peft import computing_with
from alignment.rollout.processors import generation_config, neutral_defaults
from alignment.training.sampling import sampling_of

_HELP = """\
/reset       start a new conversation
/regenerate  answer the last message again, with another seed
/help        show this list
/quit        end the command, as Ctrl-D does"""


class Speaker:
    """A model that answers, with its adapter or without it, and the conversation as it sees it.

    Without a chat template, each message is a prompt of its own.
    """

    def __init__(
        self, title: str, model: PreTrainedModel, adapter: str | None, tokenizer: Any, given: Namespace
    ) -> None:
        self.title, self.model, self.adapter, self.rows = title, model, adapter, RowTokenizer(tokenizer)
        self.positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        self.has_template, self.turns = bool(tokenizer.chat_template), list[dict[str, str]]()
        self.system = [{"role": "system", "content": given.system}] if given.system else []
        own = sampling_of(model.generation_config, tokenizer, given.sampling["max_new_tokens"])
        ends = [self.rows.end_of_turn] if self.has_template and self.rows.end_of_turn is not None else []
        self.sampling = replace(own, eos_token_ids=(*own.eos_token_ids, *ends), **given.sampling)
        if not self.has_template:
            _note(f"{title}: without a chat template, each message is a prompt of its own")

    def answer(self, message: str, seed: int) -> None:
        """Print an answer to the message, and add both to the conversation. Ctrl-C ends the answer.

        Raises:
            AlignmentError: the message is too long, or the chat template does not accept it.
        """
        turns = [*(self.turns if self.has_template else ()), {"role": "user", "content": message}]
        longest = self.sampling.max_new_tokens
        while len(ids := self._ids(turns)) > self.positions - min(longest, self.positions // 2) and len(turns) > 1:
            turns = turns[2:]
            _note(f"({self.title}: the oldest turn is left out to fit {self.positions} positions)")
        if len(ids) >= self.positions:
            raise OptionError(f"{len(ids)} tokens leave no space for an answer; {self.title} has {self.positions}")
        config = generation_config(replace(self.sampling, max_new_tokens=min(longest, self.positions - len(ids))))
        given, streamer = torch.tensor([ids], device=self.model.device), _Streamer(self.rows.tokenizer)
        torch.manual_seed(seed)
        try:
            with neutral_defaults(self.model), computing_with(self.model, self.adapter):
                self.model.generate(given, config, attention_mask=torch.ones_like(given), streamer=streamer)
        except KeyboardInterrupt:
            streamer.end()
        except torch.OutOfMemoryError as error:
            raise ModelError("the GPU is out of memory: use a smaller max_new_tokens, or use_cpu") from error
        self.turns = [*turns, {"role": "assistant", "content": streamer.answer}]

    def _ids(self, turns: list[dict[str, str]]) -> list[int]:
        prompt = [*self.system, *turns] if self.has_template else turns[-1]["content"]
        return self.rows.encode([Source(prompt, (), "the conversation")])[0].prompt


class _Streamer(TextStreamer):
    """Prints an answer as it is generated, and keeps its text."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.answer = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.answer += text
        super().on_finalized_text(text, stream_end)


def load_speakers(given: Namespace) -> list[Speaker]:
    """Load the model and the one it is compared with, if any.

    Raises:
        AlignmentError: there is no such model, or it cannot be loaded.
    """
    trust, speakers, template = given.trust_remote_code, list[Speaker](), None
    found = find_model(given.run, "RUN", base=given.base, revision=given.revision, trust=trust)
    other = find_model(given.compare, "compare", trust=trust) if given.compare else None
    if given.compare == "" and (other := found.start()) is None:
        raise OptionError(f"compare: {given.run} does not tell which model it was trained from; name it")
    on_cpu = given.use_cpu or os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()
    for one in [found] if other is None else [found, other]:
        tokenizer = one.tokenizer()
        template = (tokenizer.chat_template or template) if given.apply_chat_template == "true" else None
        tokenizer.chat_template = template
        if given.system and not template:
            raise OptionError(f"system={given.system!r}: only a chat template has a place for it; remove it")
        shared = bool(speakers) and one == replace(found, found=one.found, adapter=None, options=one.options)
        with no_progress_bar():
            model = speakers[0].model if shared else one.load(torch.device("cpu" if on_cpu else "cuda:0"))
        adapter = None if one.adapter is None else f", adapter on {one.path}"
        _note(f"{one.found}: {one.options.get('method', 'model')}{adapter or ''}, {model.dtype} on {model.device}")
        speakers.append(Speaker(one.found, model, adapter and "default", tokenizer, given))
    return speakers


def converse(speakers: Sequence[Speaker], seed: int, with_terminal: bool) -> None:
    """Have the lines of stdin answered until its end or ``/quit``; without a terminal, an error is raised."""
    for line in _lines(with_terminal):
        message, before = line.strip(), [speaker.turns for speaker in speakers]
        if message == "/quit":
            return
        if message == "/reset":
            for speaker in speakers:
                speaker.turns = []
            _note("(a new conversation)")
            continue
        if message == "/regenerate" and before[0]:
            message = before[0][-2]["content"]
            for speaker in speakers:
                speaker.turns = speaker.turns[:-2]
        if re.fullmatch(r"/\w+", message):
            _note(_HELP)
        elif message:
            try:
                for speaker in speakers:
                    if len(speakers) > 1:
                        print(f"== {speaker.title} ==", flush=True)
                    speaker.answer(message, seed)
            except AlignmentError as error:
                if not with_terminal:
                    raise
                _note(f"error: {error}")
                for speaker, turns in zip(speakers, before):
                    speaker.turns = turns
            seed += 1


def _lines(with_terminal: bool) -> Iterator[str]:
    """Yield the lines of stdin, with a prompt and line editing in a terminal, where Ctrl-C discards a line."""
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    if not with_terminal:
        yield from sys.stdin
        return
    import readline  # noqa: F401 - line editing and history for input()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C no longer ends the command
    _note("Type a message. /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends.")
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _note(text: str) -> None:
    """Print what is not an answer to stderr."""
    print(text, file=sys.stderr, flush=True)
