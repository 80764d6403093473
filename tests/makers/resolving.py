"""Resolves groups of a request, with records, choices and sources that a test gives."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from art_protocol.wire import JobReport, TrainConfig, TrajectoryGroupBody
from art_server.jobs.batch_signs import Past
from art_server.jobs.resolve import Resolver
from art_server.jobs.token_sources import Limits, TokenSources
from art_server.jobs.turns import TurnTrace
from art_server.ledger import conversation
from art_server.ledger.records import Match, Record, Request
from art_server.shared.trainer_messages import Batch


class Resolved(NamedTuple):
    batch: Batch
    report: JobReport
    traces: list[list[list[TurnTrace]]]
    """What became of each turn, by group and trajectory."""


def resolve(
    groups: Sequence[TrajectoryGroupBody],
    config: TrainConfig,
    model_id: str,
    sources: TokenSources,
    limits: Limits,
    past: Past = tuple,
) -> Resolved:
    resolver = Resolver(config, model_id, sources, limits, past)
    traces = [resolver.trace_turns(group) for group in groups]
    resolved = resolver.finish()
    return Resolved(resolved.batch, resolved.report, traces)


LIMITS = Limits(vocab_size=100, max_seq_length=50)


def choice(prompt: list[int], tokens: list[int], identity: str | None = None, model: str = "p/a") -> dict[str, Any]:
    """A choice that carries its tokens."""
    entries = [{"token": str(token), "logprob": -token / 100} for token in tokens]
    body: dict[str, Any] = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "x"},
        "logprobs": {"content": entries},
        "token_ids": tokens,
        "prompt_token_ids": prompt,
    }
    if identity:
        body["art"] = {"id": identity, "step": 0, "model": model}
    return body


def bare(identity: str, **mark: Any) -> dict[str, Any]:
    """A choice that only names its record."""
    message = {"role": "assistant", "content": "x"}
    return {"message": message, "finish_reason": "stop", "art": {"id": identity, **mark}}


NUMBERS = {"a": 1, "b": 2}
"""The numbers of the project's models, by name."""


def record(
    identity: str,
    prompt: list[int],
    tokens: list[int],
    name: str = "a",
    prefix: bytes = conversation.EMPTY,
    text: str = "yes",
) -> Record:
    request = Request("r", "chat", NUMBERS[name], 0, "p", prefix_digest=prefix)
    stored = Record(identity, request, prompt, tokens, [-0.5] * len(tokens), "stop", {}, 0.0)
    return dataclasses.replace(stored, answer_digest=conversation.text_digest(text))


def sources(**overrides: Any) -> TokenSources:
    """Knows nothing but the overrides; renders a conversation before an answer as one token, a text as one a word."""

    def tokenize(text: str) -> list[int]:
        return [20 + len(word) for word in text.split()]

    def render(messages: list[dict[str, Any]], tools: Any, has_header: bool) -> list[int]:
        if has_header:
            return [10 + len(messages)]
        return [9 + len(messages), *tokenize(messages[-1]["content"]), 99]

    known: dict[str, Any] = {
        "model": NUMBERS["a"],
        "name_of": {number: f"p/{name}" for name, number in NUMBERS.items()}.__getitem__,
        "find_record": lambda _: None,
        "find_by_logprobs": lambda logprobs: [],
        "find_by_conversation": lambda prefix, answer: [],
        "render": render,
        "tokenize": tokenize,
        "decode": lambda tokens: None,
        "end_id": 99,
        "end_ids": {99},
        "stop_ids": {99},
        "find_unnamed": lambda since: [],
    }
    known |= overrides
    for name in ("find_by_logprobs", "find_by_conversation"):
        known[name] = matches_of(known[name])
    return TokenSources(**known)


def matches_of(find: Callable[..., list[Record]]) -> Callable[..., list[Match]]:
    return lambda *asked: [as_match(stored) for stored in find(*asked)]


def as_match(stored: Record) -> Match:
    prompt, tokens = tuple(stored.prompt_token_ids), tuple(stored.token_ids)
    digests = (stored.request.prefix_digest, stored.answer_digest)
    return Match(stored.choice_id, stored.request.step, prompt, tokens, *digests, lambda: stored)
