"""Judges that ask a language model somewhere else: several questions at a time, bounded retries, both orders."""

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
from alignment.engines.launch_env import rank
from alignment.engines.watch.requests import REQUESTS
from alignment.reporting.activity import ACTIVITY
from alignment.reporting.completions import as_text
from alignment.rewards.pairwise import BasePairwiseJudge
from alignment.rewards.questions import FAILED, INSTRUCTION, check_instruction, filled_in, read_verdict

_LONGEST_PAUSE_S = 300.0  # that a server may ask for, or that doubling comes to
_LOOK_S = 1.0  # between two signs of life while answers are waited for


class NoAnswer(Exception):
    """A question that was not answered for a reason that is the question's own; the others may do.

    Args:
        text: what happened.
        status: of HTTP, where there was an answer.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Busy(NoAnswer):
    """An endpoint that does not answer now, and may a moment later.

    Args:
        text: what happened.
        after: seconds that it asked to be left alone for, by every question; None: it did not say.
    """

    def __init__(self, text: str, after: float | None = None) -> None:
        super().__init__(text)
        self.after = after


class Untried(Busy):
    """A question that was not asked, for others had been given up."""


class Broken(NoAnswer):
    """An endpoint that will answer none of the questions, however often it is asked."""


class _Question(NamedTuple):
    """One of a pair; ``turned``: its second completion is shown first."""

    pair: int
    turned: bool
    text: str


class _Round:
    """What the questions of one call share: the pause that all keep, and whether there is any use in going on."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._lock, self._resume = threading.Lock(), 0.0
        self._answered, self._given_up, self._left = False, False, False

    def keep_pause(self) -> None:
        """Wait until the endpoint may be asked."""
        while (left := self._resume - time.monotonic()) > 0 and not self.ended.wait(left):
            pass

    def pause(self, seconds: float) -> None:
        """Let nobody ask for so long."""
        with self._lock:
            self._resume = max(self._resume, time.monotonic() + seconds)

    def answered(self) -> None:
        """The endpoint is alive."""
        self._answered = True

    def give_up(self) -> None:
        """A question has had all its retries."""
        self._given_up = True

    def leave(self) -> None:
        """Nobody waits for answers any more."""
        self._left = True
        self.ended.set()

    @property
    def hopeless(self) -> bool:
        """Whether to ask nothing more: a question was given up before any was answered, or nobody waits."""
        return self._left or (self._given_up and not self._answered)


class ModelJudge(BasePairwiseJudge):
    """Asks a model which of two completions is better; a subclass says how it is reached.

    Args:
        system_prompt: the question, with ``{prompt}``, ``{response0}`` and ``{response1}``; None: the one of
            :mod:`.questions`. The model has to answer with 0 or 1 alone.
        max_requests: questions in all; pairs beyond them get -1. None: no limit.
        concurrency: questions that wait for an answer at the same time, on each rank.
        retries: how often a question is repeated that a busy or broken endpoint did not answer.
        pause: seconds before the first repetition; every further one waits twice as long.
        both_orders: ask about every pair twice, with either completion first. A pair gets -1 where the two answers
            differ: the model went by the position. False asks once, in an order drawn at random.

    Raises:
        OptionError: an argument that cannot be used.
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
        """The model and where it is asked, for messages."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What its verdicts depend on, as JSON can hold it; without secrets."""

    @abstractmethod
    def ask(self, text: str) -> str | None:
        """The model's answer to one question, None for a refusal. Called by several threads at a time.

        Raises:
            NoAnswer: there is none.
        """

    def judge(self, prompts: list[Any], completions: list[Any], shuffle_order: bool = True) -> list[int]:
        """For each pair 0 (the first is better), 1 (the second is) or -1 (refused, unreadable, or a matter of order).

        Args:
            prompts: (P,) texts or conversations.
            completions: (P,) two of them for each.
            shuffle_order: without ``both_orders``, draw which completion is shown first from NumPy's generator.

        Raises:
            RewardError: the endpoint answers no question; the message names it.
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
                raise ValueError(f"{len(pair)} completions of one prompt; a judge of pairs compares 2")
            for turn in (False, True) if self.both_orders else (bool(turned[number]),):
                first, second = (as_text(each) for each in (reversed(pair) if turn else pair))
                found.append(_Question(number, turn, filled_in(self.system_prompt, as_text(prompt), first, second)))
        return found

    def _affordable(self, questions: list[_Question]) -> list[_Question]:
        """The questions that there is money left for; a pair's are asked together or not at all."""
        if self.max_requests is None:
            return questions
        each = 2 if self.both_orders else 1
        left = max(0, self.max_requests - self.num_requests) // each * each
        if len(questions) > left and not self._told_of_limit:
            self._told_of_limit = True
            self._tell(f"max_requests={self.max_requests} is reached; from here on pairs get no verdict")
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
        """Go on without some answers, but not without any; a question may be at fault, an endpoint not for ever."""
        # An untried one says least.
        first = min(failed, key=lambda one: (not isinstance(one, Broken), isinstance(one, Untried)))
        said = f"{len(failed)} of {asked} questions were not answered: {first}"
        own_fault = not any(isinstance(one, (Busy, Broken)) for one in failed)
        if isinstance(first, Broken) or (len(failed) == asked and not (own_fault and self._ever_answered)):
            raise RewardError(f"judge {self.where}: {said}")
        self._tell(f"{said}; their pairs get no verdict")

    def _tell(self, text: str) -> None:
        print(f"{f'rank {rank()}: ' if rank() else ''}judge {self.where}: {text}", flush=True)

    def _answers(self, texts: Sequence[str]) -> list[str | None | NoAnswer]:
        """An answer, None for a refusal, or why there is none, for each text."""
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
                    # Each question takes bounded time: whoever waits for one does not hang.
                    _, waiting = concurrent.futures.wait(waiting, _LOOK_S)
                    ACTIVITY.progress()
                    if REQUESTS.reason is not None:  # a run that was asked to stop has little time left
                        together.ended.set()
            except BaseException:  # Ctrl-C: nothing may run on behind the caller's back
                together.leave()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [future.result() for future in futures]

    def _repeated(self, text: str, together: _Round) -> str | None:
        """One question's answer, asked for until it comes or there is no use in it."""
        for number in itertools.count(1):
            together.keep_pause()
            if together.hopeless:
                raise Untried("others were given up before it was asked")
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
    """Check an argument of a judge.

    Raises:
        OptionError: it is no number, or too small.
    """
    if value is None and empty:
        return
    kinds: tuple[Callable[..., Any], ...] = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:  # type: ignore[arg-type]
        raise OptionError(
            f"{setting(name, value)}: expected {'a whole number' if whole else 'a number'} of at least {least:g}"
        )
