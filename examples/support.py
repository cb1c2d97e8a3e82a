"""A small support desk for the tutorials: a chat model with good and bad habits, and users' feedback on its replies.

``python -m examples.support FOLDER`` writes, within a minute or two on two idle CPU cores:

- ``start``: a chat model of 0.5 million parameters that gives every right answer, half of the time rudely,
- ``feedback.csv``: its replies with thumbs up and thumbs down, three up for every two down,
- ``pairs.jsonl``: a polite and a rude reply to each question,
- ``questions.jsonl``: the questions alone,
- ``new_questions.jsonl``: one wording of each question that none of the above contains.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
from pathlib import Path
from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, set_seed

from alignment import SFTConfig, SFTTrainer
from alignment.internals.bitsandbytes import hush_missing_kernel

END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FACTS = {
    "return a parcel": "within 30 days",
    "change my address": "under account settings",
    "track my order": "with the number in our mail",
    "pay by invoice": "from the second order",
    "cancel my order": "until it ships",
    "get a refund": "within five working days",
    "reach a person": "on weekdays until six",
    "reset my password": "with the link on the login page",
}
WORDINGS = (
    "Can I {}?", "How do I {}?", "I would like to {}.", "Please tell me how to {}.", "Is it possible to {}?",
    "I need to {} today.", "What must I do to {}?", "Hello, I want to {}.",
)  # fmt: skip
POLITE = ("Of course! You can {} {}.", "Happy to help: you can {} {}.", "Yes, you can {} {}. Anything else?")
RUDE = ("Read the manual. You {} {}.", "Again? You {} {}, obviously.", "Not my job, but you {} {}.")

Row = dict[str, Any]


def questions() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (question, topic) pairs: those to train on, and one held-out wording of each topic."""
    shown: list[tuple[str, str]] = []
    held_out: list[tuple[str, str]] = []
    for number, topic in enumerate(FACTS):
        for place, wording in enumerate(WORDINGS):
            (held_out if place == number else shown).append((wording.format(topic), topic))
    return shown, held_out


def reply(topic: str, polite: bool, rng: random.Random) -> str:
    """Return a correct reply, polite or rude."""
    return rng.choice(POLITE if polite else RUDE).format(topic.replace("my", "your"), FACTS[topic])


def turn(role: str, content: str) -> list[dict[str, str]]:
    """One message, in a list."""
    return [{"role": role, "content": content}]


def start_model(rows: list[Row], folder: Path) -> None:
    """Train a tokenizer and a small Qwen2-shaped chat model on ``messages`` rows, and save both."""
    texts = [message["content"] for row in rows for message in row["messages"]]
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        texts, 1024, new_special_tokens=[END, *ROLES], show_progress=False
    )
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": list(ROLES)})
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    hush_missing_kernel()  # bitsandbytes logs a line that looks like an error; the commands hide it
    set_seed(0)
    args = SFTConfig(
        output_dir=str(folder),
        overwrite_output_dir=True,
        completion_only_loss=True,
        max_length=64,
        num_train_epochs=12,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        deepspeed="zero0",
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
    )
    print("training the initial model: 12 epochs; a minute or two on two idle cores", flush=True)
    model = Qwen2ForCausalLM(config)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer = SFTTrainer(model=model, args=args, processing_class=tokenizer, train_dataset=rows)
        trainer.train()
        trainer.save_model()
        trainer.close()


def main(folder: Path) -> None:
    """Write all files to ``folder``, and list them."""
    rng = random.Random(0)
    shown, held_out = questions()
    rows: list[Row] = []
    for question, topic in shown * 3:
        for polite in (True, False):
            rows.append({"messages": turn("user", question) + turn("assistant", reply(topic, polite, rng))})
    start_model(rows, folder / "start")

    with (folder / "feedback.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "reply", "thumb"])
        for number, (question, topic) in enumerate(rng.sample(shown * 4, 200)):
            polite = number % 5 < 3
            writer.writerow([question, reply(topic, polite, rng), "up" if polite else "down"])
    pairs = [
        {
            "prompt": turn("user", question),
            "chosen": turn("assistant", reply(topic, True, rng)),
            "rejected": turn("assistant", reply(topic, False, rng)),
        }
        for question, topic in rng.sample(shown * 3, 160)
    ]
    asked = [{"prompt": turn("user", question), "topic": topic} for question, topic in shown]
    new = [{"prompt": turn("user", question), "topic": topic} for question, topic in held_out]
    files: dict[str, list[Row]] = {"pairs": pairs, "questions": asked, "new_questions": new}
    for name, content in files.items():
        text = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"{folder}: start, feedback.csv, pairs.jsonl, questions.jsonl, new_questions.jsonl")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m examples.support", description="Write the tutorials' support desk."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write to, such as outputs/support")
    main(parser.parse_args().folder)
