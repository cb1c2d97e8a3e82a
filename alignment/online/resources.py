"""The reward models, reward functions or judge of a run.

Everything that can be checked without loading a model is checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from transformers import PreTrainedModel

from alignment.checkpoint.fingerprints import code_fingerprint, model_fingerprint
from alignment.config.dtypes import DtypePlan
from alignment.config.errors import OptionError, setting
from alignment.config.fields import keywords
from alignment.config.lookup import load_callable
from alignment.config.options_online import CLASSIFIER_OPTIONS, OnlineOptions
from alignment.data.kinds.prompts import prompt_row
from alignment.models.adapters.record import Adapters
from alignment.models.source import ModelSource
from alignment.online.arguments import (
    given_judge,
    given_once,
    is_classifier,
    is_of,
    listed,
    reward_sources,
    tokenizer_of_each,
)
from alignment.online.ranking import JudgeRanker, Ranker, RewardRanker
from alignment.online.window import OnlineWindowPass
from alignment.planning.placing import Cards, Choice
from alignment.planning.plan import Frozen
from alignment.rewards.combined import Rewards
from alignment.rewards.functions import FunctionReward
from alignment.rewards.judges import Judge
from alignment.rewards.reward_model import ClassifierReward
from alignment.rewards.samples import RewardSource
from alignment.rollout.backend import Rollout
from alignment.rollout.engine import RolloutEngine
from alignment.rollout.processors import check_generation_kwargs
from alignment.rollout.vllm.rollout import VLLMRollout
from alignment.run.retries import NEVER, Retries
from alignment.training.context import Resources, RunContext
from alignment.training.data import PreparedData
from alignment.training.method import Models
from alignment.training.window import WindowPass

Function: TypeAlias = Callable[..., Any] | PreTrainedModel | str


class OnlineResources(Resources):
    """The ranker of a run, from its options and the constructor's arguments.

    Args:
        options: the run's options.
        dtypes: the run's dtypes.
        stage: ZeRO stage of the policy.
        reward_model: a sequence classifier: path or live model; None uses ``reward_model_path``.
        reward_funcs: callables, ``file.py:function``, or sequence classifiers; None uses the option.
        judge: a callable, an object with ``judge``, or any value of the option; None uses the option.
        tokenizers: one for a single classifier, or a list with one per reward source, the reward model first, and
            None for functions; None loads each model's own tokenizer.
        trained: live models of the run, which cannot also be reward models.
        beta: maps an epoch number to beta.
        retries: retry policy for reward functions and judges.
        cards: the GPUs on which reward models are placed; None detects them.
        policy: the policy's model, and the adapters that it trains, for a rollout by vLLM.

    Raises:
        OptionError: if no reward source or judge is set, both are set, or one of them cannot be used.
        ModelError: if a reward model cannot be used.
    """

    def __init__(
        self,
        options: OnlineOptions,
        dtypes: DtypePlan,
        stage: int,
        reward_model: str | PreTrainedModel | None = None,
        reward_funcs: Function | Sequence[Function] | None = None,
        judge: Any = None,
        tokenizers: Any = None,
        trained: Sequence[Any] = (),
        beta: Callable[[int], float] = lambda epoch: 0.0,
        retries: Retries = NEVER,
        cards: Cards | None = None,
        policy: tuple[ModelSource, Adapters | None] | None = None,
    ) -> None:
        self.options, self.dtypes, self.beta, self.cards = options, dtypes, beta, cards
        check_generation_kwargs(keywords(options.generation_kwargs))
        self.rollout = self._rollout(policy)
        if options.ds3_gather_for_generation is not None and stage != 3:
            raise OptionError(
                f"{setting('ds3_gather_for_generation', options.ds3_gather_for_generation)}: has no effect with ZeRO "
                f"stage {stage}, where every rank holds all weights of the policy; remove it"
            )
        path = None if is_of(reward_model, options.reward_model_path) else options.reward_model_path
        reward_model = given_once("reward_model", reward_model, path)
        functions = listed(given_once("reward_funcs", reward_funcs, options.reward_funcs))
        judge = given_judge(judge, options, reward_model, functions, tokenizers)
        self.classifiers: list[ClassifierReward] = []
        if judge is not None:
            self.ranker: Ranker = JudgeRanker(Judge(judge, retries=retries))
            return
        given = reward_sources(reward_model, functions, trained)
        own = tokenizer_of_each(tokenizers, given)
        sources = [self._source(one, tokenizer) for one, tokenizer in zip(given, own, strict=True)]
        for name in CLASSIFIER_OPTIONS:
            if getattr(options, name) is not None and not self.classifiers:
                raise OptionError(f"{name}: has no effect without a reward model; remove it")
        self.ranker = RewardRanker(Rewards(sources, options.reward_weights, options.missing_eos_penalty, retries))

    def _rollout(self, policy: tuple[ModelSource, Adapters | None] | None) -> Rollout:
        options = self.options
        if options.rollout_backend == "vllm":
            assert policy is not None
            return VLLMRollout(options, *policy, self.dtypes.compute)
        return RolloutEngine(
            backend=options.rollout_backend,
            batch_size=options.rollout_batch_size,
            gather=options.ds3_gather_for_generation,
            longest_context=options.max_length,
        )

    def _source(self, given: Any, tokenizer: Any) -> RewardSource:
        """Return a model source for a model or path, else a function source."""
        if not is_classifier(given):
            return FunctionReward(load_callable(given, "reward_funcs") if isinstance(given, str) else given)
        options = self.options
        classifier = ClassifierReward(
            given,
            tokenizer,
            options=options,
            dtypes=self.dtypes,
            placement=options.reward_placement,
            deepspeed=options.reward_deepspeed,
            batch_size=options.reward_batch_size,
            in_4bit=bool(options.reward_load_in_4bit),
            place=self._place,
        )
        if self.cards is not None and (options.reward_placement or options.reward_deepspeed) is not None:
            self.cards.take(classifier.source, classifier.frozen.placement.name)
        self.classifiers.append(classifier)
        return classifier

    def _place(self, source: ModelSource) -> Choice | None:
        """Return the placement of a reward model, given the models placed before it, and the reason."""
        return None if self.cards is None else self.cards.place(source)

    @property
    def frozen(self) -> tuple[Frozen, ...]:
        return tuple(
            Frozen("reward model", one.source, one.frozen.placement.name, "score", one.batch_size)
            for one in self.classifiers
        )

    def check_data(self, data: PreparedData) -> None:
        """Check that the rows can be scored: columns that functions require, and a chat template.

        Raises:
            OptionError: if a function requires a column that is missing.
            ModelError: if prompts are conversational and the reward model's tokenizer has no chat template.
        """
        if not isinstance(self.ranker, RewardRanker):
            return
        first = 0
        for part in data.parts:
            row = prompt_row(data.dataset, first)
            self.ranker.rewards.check(row.columns, part.where)
            for classifier in self.classifiers:
                classifier.check(row.prompt, data.place(first), row.template)
            first += part.report.rows_out

    def window_pass(self, context: RunContext, models: Models, aux_coefficient: float | None) -> WindowPass:
        """Return the window pass that generates and ranks completions; its decisions are part of the run's state."""
        if isinstance(self.ranker, RewardRanker):
            self.ranker.rewards.follow(context.state)
        window_pass = OnlineWindowPass(
            context, models, aux_coefficient, self.options, self.ranker, self.rollout, self.beta
        )
        context.run_state.register("rollout", self.rollout)
        context.run_state.register("completions", window_pass.log)
        return context.run_state.register_on_each_rank("online", window_pass)

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.ranker.metrics, *self.rollout.metrics)

    def build(self) -> list[str]:
        """Check that the judge's endpoint is reachable, start the rollout, and load the reward models."""
        lines = self.ranker.judge.ready() if isinstance(self.ranker, JudgeRanker) else []
        lines += self.rollout.start()
        for classifier in self.classifiers:
            classifier.build()
        return [*lines, *(classifier.describe() for classifier in self.classifiers)]

    def looked_at(self) -> list[str]:
        """Check that the judge's endpoint is reachable."""
        return self.ranker.judge.looked_at() if isinstance(self.ranker, JudgeRanker) else []

    def fingerprints(self) -> dict[str, str]:
        """Return a content fingerprint for each classifier; for functions and judges, the name and a source hash."""
        if isinstance(self.ranker, JudgeRanker):
            return {self.ranker.judge.name: code_fingerprint(self.ranker.judge.code)}
        assert isinstance(self.ranker, RewardRanker)
        found = {}
        for name, source in zip(self.ranker.rewards.names, self.ranker.rewards.sources, strict=True):
            if isinstance(source, ClassifierReward):
                found[name] = model_fingerprint(source.source)
            else:
                found[name] = code_fingerprint(source.function if isinstance(source, FunctionReward) else source)
        return found

    def settings(self) -> dict[str, Any]:
        """Return the reward models' DeepSpeed configurations by file name."""
        names = ("reward_deepspeed.json", *(f"reward_deepspeed_{n}.json" for n in range(2, len(self.classifiers) + 1)))
        return {name: classifier.frozen.ds_config for name, classifier in zip(names, self.classifiers)}

    def close(self) -> None:
        """Release the reward models, and what generates."""
        self.rollout.close()
        if isinstance(self.ranker, RewardRanker):
            self.ranker.rewards.close()
