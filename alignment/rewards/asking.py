"""Judges that query a remote language model: concurrent requests, bounded retries, both orders of a pair."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from alignment.config.errors import OptionError, RewardError, setting
from alignment.reporting.completions import as_text
from alignment.rewards.pairwise import BasePairwiseJudge
from alignment.rewards.questions import FAILED, INSTRUCTION, check_instruction, filled_in, read_verdict
from alignment.run.activity import ACTIVITY
from alignment.run.ranks import rank
from alignment.run.stop import REQUESTS

_LONGEST_PAUSE_S = 300.0  # limit of exponential backoff and of Retry-After
_LOOK_S = 1.0  # seconds between heartbeats while waiting for answers


class NoAnswer(Exception):
    """A question failed for a reason that may only concern this question.

    Args:
        text: what happened.
        status: the HTTP status, if there was a response.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Busy(NoAnswer):
    """An endpoint is temporarily unavailable.

    Args:
        text: what happened.
        after: seconds after which the endpoint asked to be retried, which applies to all questions; None if unknown.
    """

    def __init__(self, text: str, after: float | None = None) -> None:
        super().__init__(text)
        self.after = after


class Untried(Busy):
    """A question was not sent, because others had failed permanently."""


class Broken(NoAnswer):
    """An endpoint cannot answer any questions, so retrying is useless."""


class _Question(NamedTuple):
    """A question about a pair. If ``turned``, the second completion is shown first."""

    pair: int
    turned: bool
    text: str


class _Round:
    """State shared by the questions of one call: the common pause, and whether to continue."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._lock, self._resume = threading.Lock(), 0.0
        self._answered, self._given_up, self._left = False, False, False

    def keep_pause(self) -> None:
        """Wait until the endpoint may be queried."""
        while (left := self._resume - time.monotonic()) > 0 and not self.ended.wait(left):
            pass

    def pause(self, seconds: float) -> None:
        """Delay all queries by ``seconds``."""
        with self._lock:
            self._resume = max(self._resume, time.monotonic() + seconds)

    def answered(self) -> None:
        """Record that the endpoint has answered."""
        self._answered = True

    def give_up(self) -> None:
        """Record that a question has failed after all retries."""
        self._given_up = True

    def leave(self) -> None:
        """Record that the caller no longer waits for answers."""
        self._left = True
        self.ended.set()

    @property
    def hopeless(self) -> bool:
        """Whether to stop: a question failed before any was answered, or the caller has left."""
        return self._left or (self._given_up and not self._answered)


class ModelJudge(BasePairwiseJudge):
    """Base class of judges that ask a model which of two completions is better.

    Args:
        system_prompt: the question, with ``{prompt}``, ``{response0}`` and ``{response1}``; None for the one in
            :mod:`.questions`. The model must answer with 0 or 1 only.
        max_requests: maximum total number of questions; further pairs get -1. None: no limit.
        concurrency: maximum number of concurrent questions on each rank.
        retries: number of retries if the endpoint is busy or fails.
        pause: seconds before the first retry, doubled for each further retry.
        both_orders: ask about every pair twice, in both orders. A pair gets -1 if the two answers disagree, because
            the model then decided by position. False asks once, in random order.

    Raises:
        OptionError: an argument is invalid.
    """

    def __init__(
        self,
        system_prompt: str | None = None,
        *,
        max_requests: int | None = None,
        concurrency: int = 8,
        retries: int = 4,
        pause: float = 1.0,
        both_orders: bool = True,
    ) -> None:
        self.system_prompt = check_instruction(INSTRUCTION if system_prompt is None else system_prompt)
        self.max_requests, self.num_requests = max_requests, 0
        self.concurrency, self.retries, self.pause = concurrency, retries, pause
        self.both_orders = both_orders
        for name, least in (("max_requests", 1), ("concurrency", 1), ("retries", 0), ("pause", 0)):
            check_number(name, getattr(self, name), least, whole=name != "pause", empty=name == "max_requests")
        if not isinstance(both_orders, bool):
            raise OptionError(f"{setting('both_orders', both_orders)}: expected true or false")
        self._ever_answered = self._told_of_limit = False

    @property
    @abstractmethod
    def where(self) -> str:
        """The model and its location, for messages."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Everything that the verdicts depend on, as JSON values, without secrets."""

    @abstractmethod
    def ask(self, text: str) -> str | None:
        """Return the model's answer to a question, or None for a refusal. Called from several threads.

        Raises:
            NoAnswer: the question was not answered.
        """

    def judge(self, prompts: list[Any], completions: list[Any], shuffle_order: bool = True) -> list[int]:
        """Return for each pair 0 (the first is better), 1 (the second) or -1 (refused, unreadable or inconsistent).

        Args:
            prompts: (P,) texts or conversations.
            completions: (P,) two completions for each prompt.
            shuffle_order: without ``both_orders``, choose which completion is shown first with NumPy's generator.

        Raises:
            RewardError: the endpoint answers no questions; the message names it.
        """
        questions = self._affordable(self._questions(prompts, completions, shuffle_order))
        verdicts: list[list[int]] = [[] for _ in prompts]
        for question, verdict in zip(questions, self._verdicts(questions), strict=True):
            verdicts[question.pair].append(1 - verdict if question.turned and verdict != FAILED else verdict)
        wanted = 2 if self.both_orders else 1
        return [own[0] if len(own) == wanted and len(set(own)) == 1 else FAILED for own in verdicts]

    def _questions(self, prompts: Sequence[Any], completions: Sequence[Any], shuffle: bool) -> list[_Question]:
        turned = np.random.random(len(prompts)) < 0.5 if shuffle and not self.both_orders else [False] * len(prompts)
        found = []
        for number, (prompt, pair) in enumerate(zip(prompts, completions, strict=True)):
            if len(pair) != 2:
                raise ValueError(f"a prompt has {len(pair)} completions; a pairwise judge compares 2")
            for turn in (False, True) if self.both_orders else (bool(turned[number]),):
                first, second = (as_text(each) for each in (reversed(pair) if turn else pair))
                found.append(_Question(number, turn, filled_in(self.system_prompt, as_text(prompt), first, second)))
        return found

    def _affordable(self, questions: list[_Question]) -> list[_Question]:
        """Return the questions within the limit. The two questions of a pair are asked together or not at all."""
        if self.max_requests is None:
            return questions
        each = 2 if self.both_orders else 1
        left = max(0, self.max_requests - self.num_requests) // each * each
        if len(questions) > left and not self._told_of_limit:
            self._told_of_limit = True
            self._tell(f"max_requests={self.max_requests} is reached; further pairs get no verdict")
        return questions[:left]

    def _verdicts(self, questions: list[_Question]) -> list[int]:
        self.num_requests += len(questions)
        answers = self._answers([question.text for question in questions])
        failed = [answer for answer in answers if isinstance(answer, NoAnswer)]
        if failed:
            self._check(failed, len(answers))
        self._ever_answered |= len(failed) < len(answers)
        return [FAILED if isinstance(answer, NoAnswer) else read_verdict(answer) for answer in answers]

    def _check(self, failed: Sequence[NoAnswer], asked: int) -> None:
        """Continue without some of the answers, but raise an error if the endpoint answers no questions at all."""
        # Questions that were not sent are the least informative.
        first = min(failed, key=lambda one: (not isinstance(one, Broken), isinstance(one, Untried)))
        said = f"{len(failed)} of {asked} questions were not answered: {first}"
        own_fault = not any(isinstance(one, (Busy, Broken)) for one in failed)
        if isinstance(first, Broken) or (len(failed) == asked and not (own_fault and self._ever_answered)):
            raise RewardError(f"judge {self.where}: {said}")
        self._tell(f"{said}; their pairs get no verdict")

    def _tell(self, text: str) -> None:
        print(f"{f'rank {rank()}: ' if rank() else ''}judge {self.where}: {text}", flush=True)

    def _answers(self, texts: Sequence[str]) -> list[str | None | NoAnswer]:
        """Return for each text the answer, None for a refusal, or the error."""
        together = _Round()

        def answer(text: str) -> str | None | NoAnswer:
            try:
                return self._repeated(text, together)
            except NoAnswer as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(self.concurrency, "alignment-judge") as pool:
            try:
                futures = [pool.submit(answer, text) for text in texts]
                waiting = set(futures)
                while waiting:
                    # Each question takes bounded time, so waiting for one is not a hang.
                    _, waiting = concurrent.futures.wait(waiting, _LOOK_S)
                    ACTIVITY.progress()
                    if REQUESTS.reason is not None:  # a run that is about to stop has little time left
                        together.ended.set()
            except BaseException:  # Ctrl-C: leave no threads running
                together.leave()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [future.result() for future in futures]

    def _repeated(self, text: str, together: _Round) -> str | None:
        """Ask a question, with retries."""
        for number in itertools.count(1):
            together.keep_pause()
            if together.hopeless:
                raise Untried("not sent, because other questions had failed")
            try:
                answer = self.ask(text)
            except Busy as error:
                if number > self.retries:
                    together.give_up()
                    raise Busy(f"{error}, after {self.retries} retries" if self.retries else str(error)) from None
                own = min(self.pause * 2 ** (number - 1), _LONGEST_PAUSE_S)
                if error.after is not None:
                    together.pause(min(error.after, _LONGEST_PAUSE_S))
                else:
                    together.ended.wait(own)
            except Broken:
                together.give_up()
                raise
            else:
                together.answered()
                return answer
        raise AssertionError


def check_number(name: str, value: Any, least: float, *, whole: bool, empty: bool = False) -> None:
    """Check a numeric argument of a judge.

    Raises:
        OptionError: the value is not a number, or is too small.
    """
    if value is None and empty:
        return
    kinds: tuple[Callable[..., Any], ...] = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:  # type: ignore[arg-type]
        raise OptionError(
            f"{setting(name, value)}: expected {'an integer' if whole else 'a number'} of at least {least:g}"
        )
