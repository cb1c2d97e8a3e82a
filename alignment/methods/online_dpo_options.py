"""The options of Online DPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt

from alignment.compat.trl.table import OnlineDPOCompatibility
from alignment.config import checks
from alignment.config.errors import refuse
from alignment.config.fields import Count, Early, Free, LossName, NotNegative, OrList, option, words
from alignment.config.options_online import VLLM_OPTIONS, OnlineOptions, RewardOptions
from alignment.config.registry import Paper
from alignment.methods.losses import listed, papers
from alignment.objectives import dpo
from alignment.objectives.table import Loss


@dataclass(kw_only=True)
class OnlineDPOConfig(OnlineOptions, OnlineDPOCompatibility):
    """Options of Online DPO, on pairs of the policy's own completions (https://arxiv.org/abs/2402.04792).

    Raises:
        OptionError: an unknown name, a value of the wrong type, or an invalid value.
    """

    TITLE: ClassVar[str] = "Online DPO"
    method: ClassVar[str] = "online_dpo"
    LOSSES: ClassVar[Mapping[str, Loss]] = dpo.ONLINE_LOSSES
    PAPERS: ClassVar[Mapping[str, Paper]] = papers(
        LOSSES,
        "Direct Language Model Alignment from Online AI Feedback",
        "https://arxiv.org/abs/2402.04792",
    )
    needs_reference: ClassVar[bool] = True

    learning_rate: Early[NotNegative] = option(5e-7, "Peak learning rate.")
    loss_type: LossName = option("sigmoid", f"Loss: {listed(LOSSES)}.")
    beta: Annotated[float, Gt(0), OrList] = option(
        0.1,
        "Strength of the regularization toward the reference, or a list with a value per epoch, of which the last "
        "applies to all further epochs.",
        several=True,
    )
    max_windows_without_pairs: Free[Count | None] = option(
        20,
        "Stop the run after this number of windows in a row without a pair to train on, from which the model learns "
        "nothing. `null`: never.",
    )

    def check(self) -> None:
        """Check the options of Online DPO."""
        super().check()
        if not self.betas:
            refuse(self, "beta", "cannot be empty; set a number")
        checks.need_reference(self, "Online DPO", known_rows=False)
        checks.refuse_labels(self, "Online DPO")

    @property
    def betas(self) -> tuple[float, ...]:
        """The beta of each epoch; the last value applies to all further epochs."""
        beta: Any = self.beta
        return tuple(beta) if isinstance(beta, list) else (beta,)


@dataclass(kw_only=True)
class SampleConfig(OnlineDPOConfig):
    """Options of ``sample`` and ``compare``: both accept :attr:`ACCEPTED`, and ``sample`` also :attr:`OF_ROWS`."""

    TITLE: ClassVar[str] = "Sampling"
    needs_reference: ClassVar[bool] = False
    ACCEPTED: ClassVar[tuple[str, ...]] = (
        *words("max_length max_new_tokens temperature top_p top_k min_p repetition_penalty generation_kwargs seed"),
        *words("rollout_backend rollout_batch_size ds3_gather_for_generation chunk_size use_vllm"),
        *VLLM_OPTIONS,
        *RewardOptions.__annotations__,
        *words("dataset_config dataset_train_split column_map apply_chat_template max_eval_samples"),
        *words("dataset_num_proc strict_data"),
        *words("trust_remote_code attn_implementation dtype load_in_4bit load_in_8bit use_liger_kernel deepspeed"),
        *words("use_cpu disable_tqdm retries retry_pause hang_timeout hang_timeout_first hang_factor peer_timeout"),
    )
    OF_ROWS: ClassVar[tuple[str, ...]] = words("num_generations rows threshold min_margin out")

    num_generations: Count = option(4, "Completions per prompt.")
    chunk_size: Count = option(32, "Number of prompts that a rank samples, scores and saves at a time.")
    rows: Free[Literal["completions", "unpaired", "pairs"]] = option(
        "completions",
        "Rows to write: `completions` (all of them, for `sft`), `unpaired` (with a label, for `kto`) or `pairs` (the "
        "best and the worst completion of a prompt, for `dpo`, `cpo` and `reward`).",
    )
    threshold: Free[float | None] = option(
        None, "Lowest score of a desirable completion. Unset: desirable above, undesirable below the prompt's median."
    )
    min_margin: Free[NotNegative] = option(0.0, "Smallest difference between the scores of a pair.")
    out: Free[str | None] = option(None, "File to write. Defaults to `ROWS.jsonl` in the folder of the run.")

    def check(self) -> None:
        """Check that completions are scored if the rows depend on it."""
        super().check()
        if self.rows != "completions" and not self.scored:
            refuse(self, "rows", "needs scores; set reward_funcs (file.py:function), reward_model_path or judge")
        for name, unset, needed in (("threshold", None, "unpaired"), ("min_margin", 0.0, "pairs")):
            if getattr(self, name) != unset and self.rows != needed:
                refuse(self, name, f"has an effect only with rows: {needed}; remove it")

    @property
    def scored(self) -> bool:
        """Whether completions are scored or judged."""
        return self.reward_model_path is not None or bool(self.reward_funcs) or self.judge is not None
