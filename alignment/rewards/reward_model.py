"""A reward model as a source of rewards: its own engine, its own tokenizer and chat template, its own batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from alignment.config.dtypes import DtypePlan
from alignment.config.errors import DataError, ModelError, RewardError
from alignment.config.options import AlignmentConfig
from alignment.config.placement import plan_frozen
from alignment.data.batching import collate, ends
from alignment.data.messages import Text
from alignment.data.prepare import check_vocabulary
from alignment.data.tokenization import RowTokenizer, Source
from alignment.engines.collectives import device, largest_over_ranks
from alignment.engines.launch_env import world_size
from alignment.engines.scoring import FrozenEngine, frozen_engine
from alignment.models.classifier import longest_sequence
from alignment.models.kernels import liger_type
from alignment.models.leaves import mark_leaves, unmark_leaves
from alignment.models.quantization import plan_quantization
from alignment.models.source import ModelSource, model_source
from alignment.models.tasks import CLASSIFIER
from alignment.rewards.callables import raise_together
from alignment.rewards.samples import Samples, spoken

Place: TypeAlias = Callable[[ModelSource, int | None], tuple[str, str] | None]


class ClassifierReward:
    """Scores completions with a sequence classifier that has one label, or two of which the first is the score.

    Made without loading a weight; :meth:`build`, or else the first :meth:`score`, builds the engine. Prompt and
    completion are tokenised as in the training of a reward model: as one text or conversation, ended once.

    Args:
        model: path, hub name or live model.
        tokenizer: the reward model's; None loads the one of its folder.
        options: the run's: seed, attention, device.
        dtypes: the run's; the reward model computes in the policy's dtype.
        placement: ``offload``, ``sharded`` or ``replica``; None: as ``deepspeed`` says, or by the machine.
        deepspeed: JSON of its engine: path, packaged name or mapping; None: the packaged one of the placement.
        batch_size: sequences of one forward; None: two for each row of the policy's micro-batch.
        in_4bit: keep its weights in 4 bits.
        place: gives the placement of a model with weights of so many bits, and the sizes that speak for it, if neither
            ``placement`` nor ``deepspeed`` says.

    Attributes:
        name: what metrics call it.
        frozen: placement and DeepSpeed JSON of its engine.
        truncated: sequences of this rank that were cut to the model's positions in the last call of :meth:`score`.
        tokens: tokens of this rank that were scored in the last call.

    Raises:
        ModelError: a model or tokenizer that cannot be used.
        OptionError: a DeepSpeed JSON that cannot be used, or that contradicts ``placement``.
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
        place: Place = lambda source, bits: None,
    ) -> None:
        self.source = model_source(model, "reward_model_path", options, task=CLASSIFIER)
        self.options, self.dtypes = options, dtypes
        config = self.source.config.get_text_config()
        tokenizer = self.source.tokenizer(tokenizer, "reward_processing_class", options.trust_remote_code)
        check_vocabulary(tokenizer, config.vocab_size, self.source.name)
        self.rows, self._longest = RowTokenizer(tokenizer, whole=True), int(tokenizer.model_max_length)
        self._why = ""
        if placement is None and deepspeed is None:
            placement, self._why = place(self.source, 4 if in_4bit else None) or (None, "")
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
        )
        quantization = plan_quantization(
            options,
            self.source.config,
            self.source.init_kwargs,
            key="reward_model_path",
            in_4bit=in_4bit,
            live=self.source.live is not None,
            compute=getattr(torch, dtypes.compute),
            stage=int(self.frozen.ds_config["zero_optimization"]["stage"]),
        )
        self.source = replace(self.source, quantization=quantization)
        self.truncated = self.tokens = 0
        self._engine: FrozenEngine | None = None

    def describe(self) -> str:
        """One line for the start of a run."""
        text = f"reward model: {self.source.name}, {self.frozen.placement.name}, {self.batch_size} sequences at once"
        text += f", {self._why}" if self._why else ""
        if self.source.config.num_labels > 1:
            text += f"; of its {self.source.config.num_labels} labels the score is the logit of the first"
        plain = self.options.use_liger_kernel and liger_type(self.source.config) is None
        return f"{text}; Liger has no kernels for a {self.source.config.model_type} model" if plain else text

    def check(self, prompt: Text, place: str, template: Mapping[str, Any]) -> None:
        """Whether prompts like this one can be given to the reward model, known before anything is loaded.

        Args:
            prompt: of one row.
            place: names the row in messages.
            template: variables of its chat template besides the messages.

        Raises:
            ModelError: it is conversational, and the reward model's tokenizer has no chat template.
            DataError: the chat template fails on it.
        """
        if not isinstance(prompt, str) and not self.rows.tokenizer.chat_template:
            raise ModelError(
                f"reward_processing_class: {place} is conversational, but the reward model's tokenizer "
                f"{self.rows.name} has no chat template; set its chat_template, or give prompts that are strings"
            )
        self.rows.encode([Source(prompt, (spoken(prompt, "a"),), place, template)])

    def build(self) -> FrozenEngine:
        """The engine, built if it is not there. Collective.

        Raises:
            ModelError: the model cannot be loaded, or does not compute scores in a way that is known.
        """
        if self._engine is None:
            compute = getattr(torch, self.dtypes.compute)
            model = self.source.load(self.options, compute, self.frozen.ds_config, device())
            self._longest = min(self._longest, longest_sequence(model) or self._longest)
            self._leaves = mark_leaves(model, self.frozen.ds_config)
            try:
                self._engine = frozen_engine(model, self.frozen.ds_config, CLASSIFIER)
            except BaseException:
                unmark_leaves(self._leaves)  # of a live model, which stays the user's
                raise
        return self._engine

    def score(self, samples: Samples) -> list[float | None]:
        """The score of every sample; None for one without a single token. Collective; ranks may have unequal numbers.

        Raises:
            RewardError: a chat template failed, or a score is not finite, here or on another rank.
        """
        self.build()
        sequences: list[list[int]] = []
        failure = None
        try:
            sequences = self._tokenised(samples)
        except DataError as error:
            failure = RewardError(f"reward model {self.source.name}: {error}")
        raise_together(failure)
        scores = self._scored(sequences)
        for place, score in zip(samples.places, scores, strict=True):
            if failure is None and score is not None and not math.isfinite(score):
                failure = RewardError(
                    f"reward model {self.source.name}: its score of a completion of {place} is {score}; its weights "
                    "are broken, or too large for fp16: use bf16"
                )
        raise_together(failure)
        return scores

    def _tokenised(self, samples: Samples) -> list[list[int]]:
        """Token ids of prompt and completion together, cut on the right to what the model has positions for."""
        rows = zip(samples.prompts, samples.completions, samples.places, samples.template, strict=True)
        encoded = self.rows.encode(
            [Source(prompt, (text,), place, template) for prompt, text, place, template in rows]
        )
        whole = [[*row.prompt, *row.completions[0]] for row in encoded]
        self.truncated = sum(len(ids) > self._longest for ids in whole)
        return [ids[: self._longest] for ids in whole]

    def _scored(self, sequences: list[list[int]]) -> list[float | None]:
        """Scores in the order of the sequences, which are batched by length; every rank makes as many forwards."""
        engine, size = self.build(), self.batch_size
        order = sorted((n for n, ids in enumerate(sequences) if ids), key=lambda n: -len(sequences[n]))
        forwards = int(largest_over_ranks(torch.tensor(math.ceil(len(order) / size), device=engine.device)))
        self.tokens = sum(map(len, sequences))
        parts = []
        for start in range(0, forwards * size, size):
            own = [sequences[n] for n in order[start : start + size]]
            parts.append(engine.sequence_scores(ends(collate([(ids[:-1], ids[-1:]) for ids in own], len(own)))))
        scores: list[float | None] = [None] * len(sequences)
        for place, score in zip(order, torch.cat(parts).tolist() if parts else ()):
            scores[place] = score
        return scores

    def close(self) -> None:
        """Release the engine; another :meth:`score` builds it anew."""
        if self._engine is not None:
            self._engine.close()
            unmark_leaves(self._leaves)
        self._engine = None
