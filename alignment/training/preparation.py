"""What a trainer prepares when it is created: models and tokenizer, planned and checked but not loaded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from alignment.config.dtypes import planned
from alignment.config.errors import ModelError, OptionError, one_line, setting
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import TokenizerOptions
from alignment.config.options_online import OnlineOptions
from alignment.data.windows import RowTable
from alignment.engines.collectives import together
from alignment.engines.memory import ranks_of_host
from alignment.engines.offloading import check_host_memory
from alignment.models.packed_attention import configured_refusal
from alignment.models.source import ModelSource
from alignment.models.tasks import CAUSAL_LM
from alignment.models.vocabulary import Vocabulary, check_vocabulary, fill_up, rounded_up, take_template
from alignment.planning.engines import EnginePlan, check_alike, plan_engines, with_reference
from alignment.run.ending import OtherRankFailed
from alignment.run.ranks import tell
from alignment.training.arguments import balancing_coefficient, model_sources
from alignment.training.method import AnyMethod

_TEMPLATES = (".jinja", ".j2")


@dataclass(frozen=True)
class GivenModels:
    """The models that the constructor of a trainer received, by its arguments.

    ``adapted`` is the live ``PeftModel`` around ``model``; ``tokenizers`` are the present and the older argument.
    """

    model: str | PreTrainedModel
    ref_model: str | PreTrainedModel | None
    adapted: Any
    peft_config: Any
    optimizers: tuple[Any, Any]
    tokenizers: tuple[Any, Any]


@dataclass
class PlannedModels:
    """The models of a run before they are loaded.

    ``reference`` is the same object as ``policy`` for the initial policy. ``aux_coefficient`` is the weight of the
    load-balancing loss of a mixture of experts, or None.
    """

    policy: ModelSource
    reference: ModelSource
    processing_class: Any
    engines: EnginePlan
    aux_coefficient: float | None


def plan_models(args: AlignmentConfig, method: AnyMethod, given: GivenModels) -> PlannedModels:
    """Plan models, tokenizer and engines; nothing is loaded. Collective. The method learns if adapters are trained."""
    optimizer, schedule = given.optimizers
    if optimizer is not None and isinstance(given.model, str):
        raise OptionError("optimizers: requires a live model; pass the model object whose parameters they optimize")
    if schedule is not None and (optimizer is None or schedule.optimizer is not optimizer):
        raise OptionError(
            "optimizers: the scheduler belongs to a different optimizer; pass the one that it was created with"
        )
    with together(OtherRankFailed):
        policy, reference, tokenizer, adapted = _models(args, method, given)
        coefficient = balancing_coefficient(args, policy.config)
    plan = plan_engines(args, policy, reference if method.needs_reference else None, given.peft_config, adapted)
    check_alike(plan)
    tell(plan.dtypes.note)
    if plan.adapters is not None:
        method.trains_adapters = True
        if plan.adapters.are_new and any(given.optimizers):
            raise OptionError(
                "optimizers: cannot contain the parameters of adapters that do not exist yet; pass a PeftModel"
            )
        for line in plan.adapters.notes:
            tell(line)
    return PlannedModels(policy, reference, tokenizer, plan, coefficient)


def _models(args: AlignmentConfig, method: AnyMethod, given: GivenModels) -> tuple[ModelSource, ModelSource, Any, Any]:
    """Return policy, reference, tokenizer and the live ``PeftModel`` of adapters that are trained, or None."""
    model, adapted = given.model, given.adapted
    merged = adapted is not None and given.peft_config is not None
    if merged:
        from alignment.models.adapters.merging import merge_live  # imports peft

        (model, note), adapted = merge_live(adapted), None
        tell(note)
    policy, reference = model_sources(model, given.ref_model, args, method.needs_reference, method.task)
    same = reference is policy
    if merged:
        policy = replace(policy, merged=True)
    tokenizer = _load_tokenizer(*given.tokenizers, policy, args)
    if isinstance(args, TokenizerOptions):
        tokenizer, vocabulary = with_options(tokenizer, args, policy, given.optimizers)
        policy = policy.knowing(vocabulary) if vocabulary else policy
    reference = policy if same else reference
    if method.task is not CAUSAL_LM and policy.config.num_labels > 1:
        tell(f"the model has {policy.config.num_labels} labels; only the first is trained and used as the reward")
    for source in (policy, reference):
        check_vocabulary(tokenizer, source.config.get_text_config().vocab_size, source.name)
        if args.pack == "true" and (reason := configured_refusal(source.config)) is not None:
            raise OptionError(
                f"pack: true: {source.name} cannot score several sequences in one row: {reason}; set pack to auto or "
                "false"
            )
    return policy, reference, tokenizer, adapted


def place_for(args: AlignmentConfig, method: AnyMethod, models: PlannedModels, tables: Sequence[RowTable]) -> None:
    """Place the reference again, now that the longest sequence is known, and check ``max_tokens_per_batch``."""
    sequences = max(1, len(method.completions))
    packs = args.pack != "false" and configured_refusal(models.policy.config) is None
    check_tokens(args, tables, packs and models.aux_coefficient is None)
    longest, plan = max((table.longest for table in tables), default=0), models.engines
    # Online methods generate their sequences, of up to max_length tokens.
    if longest and plan.cards is not None and not isinstance(args, OnlineOptions):
        reference = models.reference if method.needs_reference else None
        models.engines = with_reference(args, plan, reference, reference is models.policy, longest, sequences)


def check_tokens(args: AlignmentConfig, tables: Sequence[RowTable], shared: bool) -> None:
    """Check that every row fits in ``max_tokens_per_batch``; for ``shared`` see :meth:`RowTable.tokens_of_a_row`."""
    least, budget = max((table.tokens_of_a_row(shared) for table in tables), default=0), args.max_tokens_per_batch
    if budget is not None and budget < least:
        longest = max(table.longest for table in tables)
        raise OptionError(
            f"{setting('max_tokens_per_batch', budget)}: too small for sequences of up to {longest} tokens; set "
            f"at least {least}, or max_length"
        )


def check_offloading(args: AlignmentConfig, plan: EnginePlan, table: RowTable) -> None:
    """Check that the host can hold the hidden states of the longest row; later, those of micro-batches. Collective."""
    if not args.activation_offloading or planned() is not None:
        return
    config = plan.source.config.get_text_config()
    tokens = table.tokens_of_a_row(args.pack != "false" and configured_refusal(plan.source.config) is None)
    layers, hidden = (getattr(config, name, 0) for name in ("num_hidden_layers", "hidden_size"))
    with together(OtherRankFailed):
        check_host_memory(tokens * layers * hidden * plan.compute.itemsize, ranks_of_host())


def _load_tokenizer(given: Any, older_name: Any, policy: ModelSource, options: AlignmentConfig) -> Any:
    """Return the given tokenizer, or the one saved with the adapters to continue from, or the policy's own."""
    if given is not None and older_name is not None and given is not older_name:
        raise OptionError("tokenizer: processing_class is also passed; remove tokenizer, its older name")
    tokenizer = given if given is not None else older_name
    saved = options.adapter_name_or_path
    if tokenizer is None and saved is not None and (Path(saved) / "tokenizer_config.json").is_file():
        # It has the chat template that the adapters were trained with.
        policy = replace(policy, path=saved, live=None, init_kwargs={})
    return policy.tokenizer(tokenizer, "processing_class", options.trust_remote_code)


def with_options(
    tokenizer: Any, options: TokenizerOptions, policy: ModelSource, optimizers: tuple[Any, Any] = (None, None)
) -> tuple[Any, Vocabulary]:
    """Apply :class:`TokenizerOptions` to a copy of the tokenizer; return it with the changes that the model needs.

    A chat template of another tokenizer may use tokens that are missing here. In that case all added tokens of the
    other tokenizer are added, and the vocabulary is padded with unused tokens to the new size of the embeddings.

    Raises:
        OptionError: a token is not in the vocabulary, or the optimizer or adapters of a live model do not allow more.
        ModelError: a chat template cannot be read.
    """
    path = options.chat_template_path
    named = {"eos_token": options.eos_token, "pad_token": options.pad_token}
    given = {name: token for name, token in named.items() if token is not None}
    if not given and path is None:
        return tokenizer, Vocabulary()
    tokenizer, new, grows = copy.deepcopy(tokenizer), [], False
    if path is not None and path.endswith(_TEMPLATES):
        try:
            tokenizer.chat_template = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(
                f"{setting('chat_template_path', path)}: cannot be read: {one_line(error)}; set it to a Jinja file"
            ) from error
    elif path is not None:
        source = _template_source(path, options.trust_remote_code)  # type: ignore[attr-defined]
        tokens = [token.content for token in source.added_tokens_decoder.values()]
        needed = {token for token in tokens if token in source.get_chat_template()} | {source.eos_token or ""} - {""}
        if needed - set(tokenizer.get_vocab()):
            new = take_template(tokenizer, source)
        else:
            tokenizer.chat_template = source.chat_template
        grows = len(tokenizer) > policy.config.get_text_config().vocab_size
        if grows:
            new += fill_up(tokenizer, rounded_up(len(tokenizer)))
        given = ({} if source.eos_token is None else {"eos_token": source.eos_token}) | given
        _check_new(policy, grows, new, optimizers)
    vocabulary = tokenizer.get_vocab()
    for name, token in given.items():
        if token not in vocabulary:
            raise OptionError(
                f"{setting(name, token)}: not in the vocabulary of the tokenizer; set another token, or add it to "
                "tokenizer and model and save both"
            )
        setattr(tokenizer, name, token)
    rows, eos = len(tokenizer) if grows else None, tokenizer.eos_token_id if "eos_token" in given else None
    if new:
        resized = f"; resized the embeddings to {rows} rows, the new ones initialized to the mean of the others"
        said = f"chat_template_path: added {len(new)} tokens to the tokenizer of {policy.name}"
        tell(said + (resized if grows else ""))
    return tokenizer, Vocabulary(rows, tuple(tokenizer.convert_tokens_to_ids(new)), eos)


def _check_new(policy: ModelSource, grows: bool, new: list[str], optimizers: tuple[Any, Any]) -> None:
    """Check that an optimizer or adapters of a live model still match it after tokens are added."""
    if grows and any(optimizers):
        raise OptionError(
            "chat_template_path: adds tokens, which resizes the embeddings and invalidates optimizers; remove it, or "
            "call clone_chat_template() before creating the optimizer"
        )
    if new and getattr(policy.live, "peft_config", None):
        raise OptionError(
            "chat_template_path: adds tokens to a model that already has adapters; call clone_chat_template() before "
            "adding them, or set a .jinja file to write these tokens as text"
        )


def _template_source(path: str, trust_remote_code: bool) -> Any:
    key = setting("chat_template_path", path)
    try:
        source = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # network, files and code of many kinds
        raise ModelError(
            f"{key}: cannot load a tokenizer: {one_line(error)}; set it to a folder, a Hub name or a .jinja file"
        ) from error
    if not source.chat_template:
        raise ModelError(f"{key}: the tokenizer has no chat template; set another one, or a .jinja file")
    return source
