"""A turn from the ledger's record of its choice, with the distribution that each token was sampled from."""

import base64
from typing import Any

from art_server.jobs.turns import ResolvedTurn
from art_server.ledger.records import Record
from art_server.shared.trainer_messages import Distribution

RAW_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "structured": False,
    "logit_bias": None,
    "min_tokens": 0,
    "bad_words": False,
    "allowed_token_ids": False,
    "thinking_token_budget": None,
}
"""Sampling parameters under which the model's own distribution is the behaviour policy."""


def recorded_turn(record: Record, *, is_raw: bool) -> ResolvedTurn:
    """A recorded turn, scored under its behaviour policy or, with sampling="raw", under the model's own distribution."""
    logprobs = record.logprobs if is_raw else sampled_logprobs(record)
    is_unscored = is_raw or logprobs is None
    return ResolvedTurn(
        record.prompt_token_ids,
        record.token_ids,
        logprobs,
        "ledger",
        record.choice_id,
        None if is_raw else distributions_of(record),
        record.request.step,
        unusual(record.sampling) if is_unscored else {},
        requested_at=record.request.requested_at,
        session=record.request.session,
    )


def unusual(sampling: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters that make the behaviour policy differ from the model's own distribution."""
    parameters = {name: sampling.get(name) for name in RAW_SAMPLING}
    parameters["top_k"] = max(0, parameters["top_k"] or 0)  # -1 also means off
    return {name: value for name, value in parameters.items() if value is not None and value != RAW_SAMPLING[name]}


def sampled_logprobs(record: Record) -> list[float] | None:
    """The log-probabilities of a record's tokens under the behaviour policy; None if the record does not tell."""
    if record.sampled_logprobs is not None:
        return record.sampled_logprobs
    return None if unusual(record.sampling) else record.logprobs


def distributions_of(record: Record) -> list[Distribution | None] | None:
    """The distribution that each token was sampled from (None: the model's own); None if the record has no
    log-probabilities under the distributions."""
    if record.sampled_logprobs is None:
        return None
    temperature = record.sampling.get("temperature", 1.0)
    bias = {int(token): float(value) for token, value in (record.sampling.get("logit_bias") or {}).items()}
    over_vocabulary = None
    if temperature != 1.0 or bias:
        over_vocabulary = Distribution(temperature=temperature, logit_bias=bias)
    over_kept_sets = [
        Distribution(temperature=temperature, logit_bias=bias, kept=base64.b64encode(packed).decode())
        for packed in record.sets
    ]
    distributions: list[Distribution | None] = []
    for index in record.kept or [-1] * len(record.token_ids):
        distributions.append(over_vocabulary if index < 0 else over_kept_sets[index])
    return distributions
