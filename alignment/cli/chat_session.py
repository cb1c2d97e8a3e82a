"""What ``chat`` does after its arguments are parsed: load the models, read messages, and have them answered."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, TextStreamer

from alignment.checkpoint.saving import no_progress_bar
from alignment.checkpoint.trained_model import TrainedModel, find_model
from alignment.config.errors import AlignmentError, ModelError, OptionError
from alignment.config.options_chat import ChatOptions
from alignment.data.messages import Source, Text
from alignment.data.tokenization import RowTokenizer
from alignment.internals.peft import computing_with
from alignment.rollout.processors import generation_config, neutral_defaults
from alignment.training.sampling import sampling_of

_COMMANDS = {
    "/help": "show this list",
    "/reset": "start a new conversation",
    "/regenerate": "answer the last message again, with another seed",
    "/quit": "end the command, as Ctrl-D does",
}


class Speaker:
    """A model that answers: its tokenizer, its sampling distribution, and the conversation as it sees it.

    Without a chat template, or if the options say so, each message is a prompt of its own. ``adapted`` is false to
    compute with the adapter of ``model`` disabled.
    """

    def __init__(
        self, title: str, model: PreTrainedModel, tokenizer: Any, options: ChatOptions, adapted: bool = True
    ) -> None:
        self.title, self.model, self.rows, self.adapted = title, model, RowTokenizer(tokenizer), adapted
        self.positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        self.has_template = options.apply_chat_template and bool(tokenizer.chat_template)
        sampling = sampling_of(model.generation_config, tokenizer, options.max_new_tokens)
        if self.has_template and self.rows.end_of_turn is not None:
            sampling = replace(sampling, eos_token_ids=(*sampling.eos_token_ids, self.rows.end_of_turn))
        self.sampling = replace(sampling, **options.sampling)
        self.system = [] if options.system is None else [{"role": "system", "content": options.system}]
        self.turns: list[dict[str, str]] = []
        if options.apply_chat_template and not self.has_template:
            if self.system:
                raise OptionError(f"system: the tokenizer of {title} has no chat template, which would place it")
            _note(f"{title}: its tokenizer has no chat template, so each message is a prompt of its own")

    def answer(self, message: str, seed: int) -> None:
        """Print an answer to the message, and add both to the conversation. Ctrl-C ends the answer.

        Raises:
            AlignmentError: the message is too long, or the chat template does not accept it.
        """
        ids = self._prompt({"role": "user", "content": message})
        room = min(self.sampling.max_new_tokens, self.positions - len(ids))
        given, streamer = torch.tensor([ids], device=self.model.device), _Streamer(self.rows.tokenizer)
        torch.manual_seed(seed)
        disabled = contextlib.nullcontext() if self.adapted else computing_with(self.model, None)
        try:
            with neutral_defaults(self.model), disabled:
                self.model.generate(
                    given,
                    attention_mask=torch.ones_like(given),
                    generation_config=generation_config(replace(self.sampling, max_new_tokens=room)),
                    streamer=streamer,
                )
        except KeyboardInterrupt:
            streamer.end()
        except torch.OutOfMemoryError as error:
            advice = "use a smaller max_new_tokens, dtype=bfloat16 or use_cpu"
            raise ModelError(f"the GPU is out of memory: {advice}") from error
        self.turns.append({"role": "assistant", "content": streamer.answer})

    def _prompt(self, message: dict[str, str]) -> list[int]:
        """Add a message, and return the token IDs of the conversation, whose oldest turns give way to the answer."""
        turns, room = [*self.turns, message], min(self.sampling.max_new_tokens, self.positions // 2)
        while True:
            prompt: Text = [*self.system, *turns] if self.has_template else message["content"]
            ids = self.rows.encode([Source(prompt, (), "the conversation")])[0].prompt
            if len(ids) <= self.positions - room or len(turns) == 1:
                break
            turns = turns[2:] if self.has_template else [message]
            _note(f"({self.title}: the oldest turn is left out to fit {self.positions} positions)")
        if len(ids) >= self.positions:
            raise OptionError(f"{len(ids)} tokens leave no space for an answer; {self.title} has {self.positions}")
        self.turns = turns
        return ids


class _Streamer(TextStreamer):
    """Prints an answer as it is generated, and keeps its text."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.answer = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.answer += text
        super().on_finalized_text(text, stream_end)


def load_speakers(run: str, compared: str | None, options: ChatOptions) -> list[Speaker]:
    """Load the model of ``run``, and the one it is compared with, if any: ``compared``, or its start if that is empty.

    Raises:
        AlignmentError: there is no such model, or it cannot be loaded.
    """
    trust = options.trust_remote_code
    found = find_model(run, "RUN", base=options.base, revision=options.revision, trust=trust)
    other = find_model(compared, "compare", trust=trust) if compared else None if compared is None else found.start()
    if compared == "" and other is None:
        raise OptionError(f"compare: {run} does not tell which model it was trained from; name it")
    on_cpu = options.use_cpu or os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available()
    device, tokenizer = torch.device("cpu" if on_cpu else "cuda:0"), found.tokenizer()
    with no_progress_bar():
        model = found.load(device, getattr(torch, options.dtype, None))
        _note(_described(found, model))
        speakers = [Speaker(found.found, model, tokenizer, options)]
        if other is not None:
            template, shared = tokenizer.chat_template, other.is_base_of(found)
            model, tokenizer = model if shared else other.load(device, model.dtype), other.tokenizer()
            tokenizer.chat_template = tokenizer.chat_template or template
            _note(_described(other, model))
            speakers.append(Speaker(other.found, model, tokenizer, options, adapted=not shared))
    return speakers


def converse(speakers: Sequence[Speaker], seed: int, with_terminal: bool) -> None:
    """Have the lines of stdin answered until its end or ``/quit``; without a terminal, an error is raised."""
    last = ""  # the message that can be answered again
    for line in _lines(with_terminal):
        message = line.strip()
        if message == "/quit":
            return
        if message == "/regenerate" and last:
            message = last
            for speaker in speakers:
                speaker.turns = speaker.turns[:-2]
        elif message == "/reset":
            last = ""
            for speaker in speakers:
                speaker.turns = []
            _note("(a new conversation)")
        elif message == "/regenerate":
            _note("(there is no answer to replace)")
        elif re.fullmatch(r"/\w+", message):
            _note("\n".join(f"{name.ljust(12)} {about}" for name, about in _COMMANDS.items()))
        if message and not re.fullmatch(r"/\w+", message):
            last = message if _answered(speakers, message, seed, with_terminal) else ""
            seed += 1


def _answered(speakers: Sequence[Speaker], message: str, seed: int, with_terminal: bool) -> bool:
    """Answer with every model and the same seed; after an error, the conversation is as it was before."""
    before = [speaker.turns for speaker in speakers]
    try:
        for speaker in speakers:
            if len(speakers) > 1:
                print(f"== {speaker.title} ==", flush=True)
            speaker.answer(message, seed)
    except (AlignmentError, KeyboardInterrupt) as error:
        if not with_terminal:
            raise
        _note(f"error: {error}" if isinstance(error, AlignmentError) else "")
        for speaker, turns in zip(speakers, before):
            speaker.turns = turns
        return False
    return True


def _lines(with_terminal: bool) -> Iterator[str]:
    """Yield the lines of stdin, with a prompt and line editing in a terminal, where Ctrl-C discards a line."""
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    if not with_terminal:
        yield from sys.stdin
        return
    import readline  # noqa: F401 - line editing and history for input()

    _note("Type a message. /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends.")
    while True:
        try:
            line = input("> ")
        except KeyboardInterrupt:
            line = ""
            print()
        except EOFError:
            print()
            return
        yield line


def _described(found: TrainedModel, model: PreTrainedModel) -> str:
    """Describe a model: its folder, the run that trained it, and how it is loaded."""
    facts = [str(found.options["method"]).upper()] if "method" in found.options else []
    facts += [] if found.step is None else [f"step {found.step}"]
    facts += [] if found.adapter is None else [f"adapter on {found.path}"]
    return f"{found.found}: {', '.join([*facts, str(model.dtype).removeprefix('torch.')])} on {model.device}"


def _note(text: str) -> None:
    """Print what is not an answer to stderr."""
    print(text, file=sys.stderr, flush=True)
