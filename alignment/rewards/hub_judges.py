"""Judges with TRL's names that depend on other packages: Hugging Face's inference client, and PairRM."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np

from alignment.config.errors import OptionError, one_line, setting
from alignment.engines.collectives import device
from alignment.reporting.completions import as_text
from alignment.rewards.asking import Broken, Busy, ModelJudge, NoAnswer, check_number
from alignment.rewards.endpoint import is_busy, retry_after
from alignment.rewards.pairwise import BasePairwiseJudge
from alignment.run.retries import is_transient


class HfPairwiseJudge(ModelJudge):
    """Asks a model with ``huggingface_hub.InferenceClient``: an inference provider of the Hub, or a server's URL.

    Args:
        model: name on the Hub, or a URL.
        token: hub token; None for the one of ``hf auth login`` or ``HF_TOKEN``. It is only stored in the client.
        system_prompt: see :class:`.ModelJudge`, as for all arguments that are not listed here.
        timeout: seconds for a response.
        max_tokens: maximum number of tokens of an answer.

    Raises:
        OptionError: an argument is invalid.
    """

    def __init__(
        self,
        model: str = "meta-llama/Meta-Llama-3-70B-Instruct",
        token: str | None = None,
        system_prompt: str | None = None,
        *,
        timeout: float = 60.0,
        max_tokens: int = 16,
        **asking: Any,
    ) -> None:
        from huggingface_hub import InferenceClient

        super().__init__(system_prompt, **asking)
        if not isinstance(model, str) or not model.strip():
            raise OptionError(f"{setting('model', model)}: expected a name on the Hub or a URL")
        check_number("timeout", timeout, 0.001, whole=False)
        check_number("max_tokens", max_tokens, 1, whole=True)
        self.model, self.timeout, self.max_tokens = model, timeout, max_tokens
        self.client = InferenceClient(model=model, token=token, timeout=timeout)

    @property
    def where(self) -> str:
        return f"{self.model} (Hugging Face inference client)"

    @property
    def identity(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("model", "system_prompt", "both_orders", "max_tokens")}

    def ask(self, text: str) -> str | None:
        try:
            found = self.client.chat_completion([{"role": "user", "content": text}], max_tokens=self.max_tokens)
            answer = found.choices[0].message.content
        except Exception as error:  # the errors depend on the client's HTTP library, which changes between releases
            raise _refusal(error) from None
        return answer if isinstance(answer, str) else None


def _refusal(error: Exception) -> NoAnswer:
    """Convert an error of the Hub's client. It must not be chained, because its request contains the token."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if response is None or not isinstance(status, int):
        said = f"{type(error).__name__}: {one_line(error)}"
        if is_transient(error):
            return Busy(said)
        unreadable = isinstance(error, (ValueError, TypeError, AttributeError, IndexError, KeyError))
        return Busy(f"its response cannot be read ({type(error).__name__})") if unreadable else Broken(said)
    if is_busy(status):
        return Busy(f"HTTP {status}", retry_after(response.headers.get("retry-after")))
    if status in (401, 402, 403):
        return Broken(f"HTTP {status}; pass a token with inference permission, or run `hf auth login`", status)
    if status == 404 or status < 400:
        return Broken(f"HTTP {status}; check model", status)
    return NoAnswer(f"HTTP {status}", status)


class PairRMJudge(BasePairwiseJudge):
    """Ranks with PairRM (https://huggingface.co/llm-blender/PairRM) on this device, using ``llm-blender``.

    Attributes:
        blender: the package's ``Blender``.

    Raises:
        OptionError: the package is not installed, or does not work with the installed libraries.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("llm_blender") is None:
            raise OptionError(
                "judge: PairRMJudge requires the package llm-blender; run `pip install llm-blender`, or use a model "
                "at an endpoint with OpenAIPairwiseJudge"
            )
        try:
            self.blender = importlib.import_module("llm_blender").Blender()
            self.blender.loadranker("llm-blender/PairRM", device=str(device()))
        except (ImportError, AttributeError, OSError) as error:
            raise OptionError(
                f"judge: PairRMJudge: llm-blender could not be loaded: {type(error).__name__}: {one_line(error)}; use "
                "a model at an endpoint with OpenAIPairwiseJudge"
            ) from error

    def judge(
        self,
        prompts: list[Any],
        completions: list[Any],
        shuffle_order: bool = True,
        return_scores: bool = False,
        temperature: float = 1.0,
    ) -> list[Any]:
        """Return for each pair the index of the better completion, 0 or 1.

        Args:
            prompts: (P,) texts or conversations.
            completions: (P,) two completions for each prompt.
            shuffle_order: choose which completion is shown first with NumPy's generator.
            return_scores: instead return the probability that the first completion is better.
            temperature: temperature of that probability.

        Raises:
            ValueError: a prompt does not have two completions.
        """
        if any(len(pair) != 2 for pair in completions):
            raise ValueError("PairRM compares 2 completions of each prompt")
        if not prompts:
            return []
        turned = np.random.random(len(prompts)) < 0.5 if shuffle_order else np.zeros(len(prompts), dtype=bool)
        shown = [
            [as_text(each) for each in (reversed(pair) if turn else pair)] for turn, pair in zip(turned, completions)
        ]
        texts = [as_text(prompt) for prompt in prompts]
        found = np.array(self.blender.rank(texts, shown, return_scores=return_scores, disable_tqdm=True))
        found[turned] = found[turned][:, ::-1].copy()
        if not return_scores:
            return [int(place) - 1 for place in found[:, 0]]  # the rank of the first completion: 1 or 2
        margins = (found[:, 0] - found[:, 1]).astype(np.float64) / temperature
        return [float(value) for value in 1 / (1 + np.exp(-margins))]
