"""The guard: before a new step answers anybody, it answers recorded prompts, and its answers are compared with those of the step that
serves. No score is needed, so a step that broke is never seen by a user.

A step breaks in ways that neither its loss nor its rewards show: it loses the end of its turn, says nothing, or drifts far from the
step that serves. A difference counts if it is large, and larger than chance makes it.
"""

import asyncio
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from art_server.learning.answerer import Answerer, at_once
from art_server.ledger import conversation
from art_server.ledger.ledger import Ledger
from art_server.ledger.records import NEVER_LEARNS, Record
from art_server.shared.parser_families import CALL_MARKS
from art_server.store.registry import RegisteredModel

NUM_ANSWERS = 64
"""Answers of each step."""
MOST_SHARE = 0.1
"""The share of cut, empty or invalid answers may grow by so much."""
MOST_RATIO = 2.0
"""The mean length may change by this factor."""
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
        records = await asyncio.to_thread(self._ledger.find_recent, model.number, NUM_ANSWERS)
        records = [record for record in records if can_be_replayed(record)]
        if not records:
            return None
        questions = iter([(number, kind) for number in range(NUM_ANSWERS) for kind in (step, serving)])
        answers: dict[int, list[Answer]] = {step: [], serving: []}

        async def ask() -> None:
            for number, kind in questions:
                answers[kind].append(await self._answer(model, kind, serving, records[number % len(records)], number))

        await at_once(ask)
        return compare(answers[step], answers[serving], max_kl)

    async def _answer(self, model: RegisteredModel, step: int, serving: int, record: Record, seed: int) -> Answer:
        """The answer of a step to a recorded prompt. Both steps get the same seeds."""
        prompt = record.prompt_token_ids
        body = {name: record.sampling[name] for name in COPIED if record.sampling.get(name) is not None}
        limit = max_tokens(record)
        body |= {"prompt": prompt, "max_tokens": limit, "seed": seed, "return_token_ids": True}
        choice = await self._answerer.complete(model, step, body)
        sampled: list[int] = choice["token_ids"]
        divergence = 0.0
        if step != serving and sampled:
            own = await self._logprob(model, step, prompt, sampled)
            divergence = own - await self._logprob(model, serving, prompt, sampled)
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


def compare(new: Sequence[Answer], serving: Sequence[Answer], max_kl: float) -> str | None:
    """Why the answers of a new step must not be seen; None: they may be."""
    for fault, has_fault in FAULTS.items():
        share, before = (statistics.fmean(map(has_fault, answers)) for answers in (new, serving))
        error = math.sqrt((share * (1 - share) + before * (1 - before)) / len(new))
        if share - before > max(MOST_SHARE, MIN_Z * error):
            return f"{share:.0%} of its answers to recorded prompts {fault}, and {before:.0%} of those of the step that serves"
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
