"""The guard: before a new step answers anybody, it answers recorded prompts, and its answers are compared with those of the step that
serves. No score is needed, so a step that broke is never seen by a user.

A step breaks in ways that neither its loss nor its rewards show: it loses the end of its turn, says nothing, or drifts far from the
step that serves. A difference counts if it is large, and larger than chance makes it. A policy also decays slowly, each step a little
worse than the one before, so faults are compared with those of an earlier step, too.
"""

import asyncio
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from art_server.engine.engine import AdapterRefused
from art_server.learning.answerer import Answerer, at_once
from art_server.ledger import conversation
from art_server.ledger.ledger import Ledger
from art_server.ledger.records import NEVER_LEARNS, Record
from art_server.shared.parser_families import CALL_MARKS
from art_server.store.registry import RegisteredModel

logger = logging.getLogger(__name__)

NUM_ANSWERS = 64
"""Answers of each step."""
MOST_SHARE = 0.1
"""The share of cut, empty or invalid answers may grow by so much."""
MOST_RATIO = 2.0
"""The mean length may change by this factor."""
EARLIER = 8
"""The earlier step is so many steps older than the one that serves."""
MIN_Z = 2.5
"""Standard errors that a difference must have beside."""
COPIED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
NOT_REPLAYED = ("structured", "bad_words", "allowed_token_ids", "logit_bias", "thinking_token_budget")
"""Sampling parameters of which the ledger has not all that a repetition needs."""
MARKS = tuple(mark for marks in CALL_MARKS.values() for mark in marks if len(mark) > 1)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to a recorded prompt."""

    length: int
    """Tokens."""
    is_cut: bool
    is_empty: bool
    is_invalid: bool
    """The answer begins a tool call that cannot be read."""
    divergence: float
    """The sum over its tokens of log p - log q: p of the step that gave the answer, q of the step that serves."""


class Guard:
    """Samples with two steps."""

    def __init__(self, *, ledger: Ledger, answerer: Answerer):
        self._ledger = ledger
        self._answerer = answerer

    async def why_refused(self, model: RegisteredModel, step: int, serving: int, max_kl: float) -> str | None:
        """Why a step must not serve, in a sentence with numbers; None: it may. Without a recorded prompt it may.

        Raises:
            ServerError: from `Answerer`.
        """
        earlier = earlier_step((kept for kept in model.steps() if model.has(kept)), serving)
        with self._answerer.kept(model, earlier):
            return await self._compare(model, step, serving, earlier, max_kl)

    async def _compare(
        self, model: RegisteredModel, step: int, serving: int, earlier: int, max_kl: float
    ) -> str | None:
        records = await asyncio.to_thread(self._ledger.find_recent, model.number, NUM_ANSWERS)
        records = [record for record in records if can_be_replayed(record)]
        if not records:
            return None
        new = await self._answers(model, records, step, compared=serving)
        reason = compare(new, await self._answers(model, records, serving), max_kl)
        if reason is not None or earlier == serving or not has_faults(new):
            return reason
        try:
            return more_faults(new, await self._answers(model, records, earlier), f"step {earlier}")
        except AdapterRefused:
            logger.warning("the guard does without %s, because its files are broken", model.adapter_name(earlier))
            return None

    async def _answers(
        self, model: RegisteredModel, records: Sequence[Record], step: int, compared: int | None = None
    ) -> list[Answer]:
        """A step's answers to recorded prompts, and how much likelier they are than for the step that they are compared with."""
        answers: list[Answer] = []
        numbers = iter(range(NUM_ANSWERS))

        async def ask() -> None:
            for number in numbers:
                answers.append(await self._answer(model, step, compared, records[number % len(records)], number))

        await at_once(ask)
        return answers

    async def _answer(
        self, model: RegisteredModel, step: int, compared: int | None, record: Record, seed: int
    ) -> Answer:
        """The answer of a step to a recorded prompt. All steps get the same seeds."""
        prompt = record.prompt_token_ids
        body = {name: record.sampling[name] for name in COPIED if record.sampling.get(name) is not None}
        limit = max_tokens(record)
        body |= {"prompt": prompt, "max_tokens": limit, "seed": seed, "return_token_ids": True}
        choice = await self._answerer.complete(model, step, body)
        sampled: list[int] = choice["token_ids"]
        divergence = 0.0
        if compared is not None and sampled:
            own = await self._logprob(model, step, prompt, sampled)
            divergence = own - await self._logprob(model, compared, prompt, sampled)
        message = conversation.message_from(choice["text"])
        calls = message.get("tool_calls")
        return Answer(
            length=len(sampled),
            is_cut=choice["finish_reason"] == "length",
            is_empty=not calls and not (message.get("content") or "").strip(),
            is_invalid=not calls and any(mark in choice["text"] for mark in MARKS),
            divergence=divergence,
        )

    async def _logprob(self, model: RegisteredModel, step: int, prompt: list[int], sampled: list[int]) -> float:
        """The log-probability of an answer as a whole."""
        return math.fsum(await self._answerer.logprobs(model, step, prompt, sampled))


def can_be_replayed(record: Record) -> bool:
    """Whether a record's prompt may be sampled from again, as its request was."""
    is_permitted = not record.sampling.get(NEVER_LEARNS)
    return is_permitted and not any(record.sampling.get(name) for name in NOT_REPLAYED)


def max_tokens(record: Record) -> int:
    """The limit of an answer: enough to see that it is twice as long as the recorded one, and not more than its request's."""
    limit = 2 * len(record.token_ids) + 32
    asked = record.sampling.get("max_tokens")
    return limit if asked is None else min(limit, asked)


FAULTS: Mapping[str, Callable[[Answer], bool]] = {
    "are cut at their limit": lambda answer: answer.is_cut,
    "are empty": lambda answer: answer.is_empty,
    "begin a tool call that cannot be read": lambda answer: answer.is_invalid,
}


def earlier_step(steps: Iterable[int], serving: int) -> int:
    """The step with whose faults a new step's are compared beside those of the step that serves: EARLIER steps older, or the next that
    is kept."""
    older = [step for step in steps if step <= serving]
    return max((step for step in older if step <= serving - EARLIER), default=min(older, default=serving))


def has_faults(answers: Sequence[Answer]) -> bool:
    """Whether so many answers have a fault that an earlier step may have fewer (`more_faults`)."""
    return any(statistics.fmean(map(has_fault, answers)) > MOST_SHARE for has_fault in FAULTS.values())


def more_faults(new: Sequence[Answer], before: Sequence[Answer], whose: str) -> str | None:
    """What more of a new step's answers have than of another step's; None: nothing."""
    for fault, has_fault in FAULTS.items():
        share, share_before = (statistics.fmean(map(has_fault, answers)) for answers in (new, before))
        error = math.sqrt((share * (1 - share) + share_before * (1 - share_before)) / len(new))
        if share - share_before > max(MOST_SHARE, MIN_Z * error):
            return f"{share:.0%} of its answers to recorded prompts {fault}, and {share_before:.0%} of those of {whose}"
    return None


def compare(new: Sequence[Answer], serving: Sequence[Answer], max_kl: float) -> str | None:
    """Why the answers of a new step must not be seen; None: they may be."""
    if reason := more_faults(new, serving, "the step that serves"):
        return reason
    lengths, lengths_before = ([answer.length for answer in answers] for answers in (new, serving))
    mean, mean_before = statistics.fmean(lengths), statistics.fmean(lengths_before)
    error = math.sqrt((statistics.pvariance(lengths) + statistics.pvariance(lengths_before)) / len(new))
    is_far = max(mean, mean_before) > MOST_RATIO * min(mean, mean_before)
    if is_far and abs(mean - mean_before) > MIN_Z * error:
        return (
            f"its answers to recorded prompts have {mean:.1f} tokens on average, and those of the step that serves "
            f"{mean_before:.1f}"
        )
    divergence = math.fsum(answer.divergence for answer in new) / max(1, sum(lengths))
    if divergence > max_kl:
        return (
            f"its answers to recorded prompts are {divergence:.2f} nats a token less likely for the step that serves, more than "
            f"the policy's max_kl of {max_kl:g}: a lower learning_rate makes smaller steps"
        )
    return None
