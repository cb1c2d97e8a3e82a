"""A reward model as a reward source, with its own engine, tokenizer, chat template and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from alignment.config.dtypes import DtypePlan
from alignment.config.errors import DataError, ModelError, RewardError
from alignment.config.options import AlignmentConfig
from alignment.data.batching import collate, ends
from alignment.data.messages import Source, Text
from alignment.data.tokenization import RowTokenizer
from alignment.engines.collectives import device, largest_numbers
from alignment.engines.placement import plan_frozen
from alignment.engines.scoring import FrozenEngine, checked
from alignment.models.adapters.skeleton import largest_layer
from alignment.models.classifier import longest_sequence
from alignment.models.kernels import liger_type
from alignment.models.partitioning import mark_leaves, unmark_leaves
from alignment.models.quantized import quantized
from alignment.models.source import ModelSource, model_source
from alignment.models.tasks import CLASSIFIER
from alignment.models.vocabulary import check_vocabulary
from alignment.rewards.callables import raise_together
from alignment.rewards.samples import Samples, one_turn, spoken
from alignment.run.ranks import world_size

Place: TypeAlias = Callable[[ModelSource], tuple[str, str] | None]


class ClassifierReward:
    """Scores completions with a sequence classifier with one label, or with two labels, of which the first is used.

    Weights are not loaded until :meth:`build` or the first :meth:`score` builds the engine. Prompt and completion are
    tokenized as for the training of reward models: as one text or conversation, with one end token.

    Args:
        model: path, Hub name or live model.
        tokenizer: the reward model's tokenizer; None to load it from the model.
        options: the run's options.
        dtypes: the run's dtypes; the reward model computes in the policy's dtype.
        placement, deepspeed, batch_size, in_4bit: see ``reward_placement`` and so on in the options.
        place: chooses a placement for a model, and returns it with the sizes that explain it; used if both
            ``placement`` and ``deepspeed`` are None.

    Attributes:
        frozen: placement and DeepSpeed configuration of its engine.
        truncated: this rank's truncated sequences in the last call of :meth:`score`.

    Raises:
        ModelError: the model or tokenizer cannot be used.
        OptionError: the DeepSpeed configuration is invalid, or contradicts ``placement``.
    """

    name = "reward_model"

    def __init__(
        self,
        model: str | PreTrainedModel,
        tokenizer: Any = None,
        *,
        options: AlignmentConfig,
        dtypes: DtypePlan,
        placement: str | None = None,
        deepspeed: str | dict[str, Any] | None = None,
        batch_size: int | None = None,
        in_4bit: bool = False,
        place: Place = lambda source: None,
    ) -> None:
        self.source = model_source(model, "reward_model_path", options, task=CLASSIFIER)
        self.options, self.dtypes = options, dtypes
        config = self.source.config.get_text_config()
        tokenizer = self.source.tokenizer(tokenizer, "reward_processing_class", options.trust_remote_code)
        check_vocabulary(tokenizer, config.vocab_size, self.source.name)
        self.rows, self._longest = RowTokenizer(tokenizer, whole=True), int(tokenizer.model_max_length)
        self._why = ""
        if placement is None and deepspeed is None:
            placement, self._why = place(self._quantized(in_4bit, stage=0)) or (None, "")
        self.batch_size = batch_size or 2 * options.per_device_train_batch_size
        self.frozen = plan_frozen(
            options,
            "reward",
            placement=placement,
            deepspeed=deepspeed,
            dtypes=dtypes,
            world_size=world_size(),
            hidden_size=config.hidden_size,
            micro_batch=self.batch_size,
            layer=largest_layer(self._quantized(in_4bit, stage=0), getattr(torch, dtypes.compute)),
        )
        self.source = self._quantized(in_4bit, int(self.frozen.ds_config["zero_optimization"]["stage"]))
        self.truncated = 0
        self._engine: FrozenEngine | None = None

    def _quantized(self, in_4bit: bool, stage: int) -> ModelSource:
        """Return the model with its quantization for an engine of this ZeRO stage."""
        compute = getattr(torch, self.dtypes.compute)
        return quantized(
            self.source, self.options, key="reward_model_path", in_4bit=in_4bit, compute=compute, stage=stage
        )

    def describe(self) -> str:
        """Return one line for the start of a run."""
        text = f"reward model: {self.source.name}, {self.frozen.placement.name}, batch size {self.batch_size}"
        text += f", {self._why}" if self._why else ""
        if self.source.config.num_labels > 1:
            text += f"; the score is the logit of the first of its {self.source.config.num_labels} labels"
        plain = self.options.use_liger_kernel and liger_type(self.source.config) is None
        return f"{text}; Liger has no kernels for {self.source.config.model_type} models" if plain else text

    def check(self, prompt: Text, place: str, template: Mapping[str, Any]) -> None:
        """Check that the reward model supports the prompt of a row, at ``place``, before weights are loaded.

        Raises:
            ModelError: the prompt is conversational, but the reward model's tokenizer has no chat template.
            DataError: the chat template fails.
        """
        if not isinstance(prompt, str) and not self.rows.tokenizer.chat_template:
            raise ModelError(
                f"reward_processing_class: {place} is conversational, but the reward model's tokenizer "
                f"{self.rows.name} has no chat template; set its chat_template, or use prompts that are strings"
            )
        prompt, completion = one_turn(prompt, spoken(prompt, "a"))
        self.rows.encode([Source(prompt, (completion,), place, template)])

    def build(self) -> FrozenEngine:
        """Return the engine, and build it on the first call. Collective."""
        if self._engine is None:
            compute = getattr(torch, self.dtypes.compute)
            model = self.source.load(self.options, compute, self.frozen.ds_config, device())
            self._longest = min(self._longest, longest_sequence(model) or self._longest)
            self._leaves = mark_leaves(model, self.frozen.ds_config)
            try:
                scorer = CLASSIFIER.scorer(model, False)
                pack = "false" if self.options.pack == "false" else "auto"
                self._engine = checked(FrozenEngine(scorer, self.frozen.ds_config), CLASSIFIER, pack)
            except BaseException:
                unmark_leaves(self._leaves)  # a live model still belongs to the user
                raise
        return self._engine

    def score(self, samples: Samples) -> list[float | None]:
        """Score every sample; None for a sample without tokens. Collective; ranks may have different numbers.

        Raises:
            RewardError: the chat template failed, or a score is not finite, on any rank.
        """
        self.build()
        sequences: list[list[int]] = []
        failure = None
        try:
            sequences = self._tokenized(samples)
        except DataError as error:
            failure = RewardError(f"reward model {self.source.name}: {error}")
        raise_together(failure)
        scores = self._scored(sequences, samples.places)
        for place, score in zip(samples.places, scores, strict=True):
            if failure is None and score is not None and not math.isfinite(score):
                failure = RewardError(
                    f"reward model {self.source.name}: the score of a completion of {place} is {score}; its weights "
                    "are corrupted, or overflow in fp16; use another checkpoint, or bf16"
                )
        raise_together(failure)
        return scores

    def rehearse(self, tokens: int) -> None:
        """Score a batch of sequences of ``tokens`` tokens, or as many as the model has positions. Collective."""
        rows = [str(number) for number in range(self.batch_size)]  # which share no prompt
        self._scored([[0] * min(tokens, self._longest) for _ in rows], rows)

    def _tokenized(self, samples: Samples) -> list[list[int]]:
        """Return the token IDs of prompt + completion, truncated on the right to the positions of the model."""
        turns = map(one_turn, samples.prompts, samples.completions)
        rows = zip(turns, samples.places, samples.template, strict=True)
        encoded = self.rows.encode(
            [Source(prompt, (text,), place, template) for (prompt, text), place, template in rows]
        )
        whole = [[*row.prompt, *row.completions[0]] for row in encoded]
        self.truncated = sum(len(ids) > self._longest for ids in whole)
        return [ids[: self._longest] for ids in whole]

    @torch.no_grad()
    def _scored(self, sequences: list[list[int]], places: list[str]) -> list[float | None]:
        """Score sequences, in batches of similar lengths, in which those of a row are next to each other.

        All ranks run the same number of passes.
        """
        engine, size = self.build(), self.batch_size
        longest: dict[str, int] = {}
        for place, ids in zip(places, sequences, strict=True):
            longest[place] = max(longest.get(place, 0), len(ids))
        order = [n for n, ids in enumerate(sequences) if ids]
        order.sort(key=lambda n: (-longest[places[n]], places[n], -len(sequences[n])))
        forwards = int(largest_numbers([math.ceil(len(order) / size)])[0])
        parts = []
        for start in range(0, forwards * size, size):
            batch = order[start : start + size]
            rows: dict[str, list[int]] = {}
            for number, n in enumerate(batch):
                rows.setdefault(places[n], []).append(number)
            groups = [tuple(numbers) for numbers in rows.values() if numbers[1:]]
            own = [(sequences[n][:-1], sequences[n][-1:]) for n in batch]
            parts.append(engine.forward(ends(collate(own, len(own), groups=groups))).scores)
        scores: list[float | None] = [None] * len(sequences)
        for number, score in zip(order, torch.cat(parts).tolist() if parts else ()):
            scores[number] = score
        return scores

    def close(self) -> None:
        """Release the engine. The next :meth:`score` builds it again."""
        if self._engine is not None:
            self._engine.close()
            unmark_leaves(self._leaves)
        self._engine = None
