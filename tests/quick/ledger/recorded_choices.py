"""Choices in a ledger, without an engine."""

import dataclasses

from art_server.ledger.ledger import Ledger
from art_server.ledger.records import Request
from art_server.shared.engine_messages import FinishedChoice

REQUEST = Request("f" * 32, "chat", 1, 3, "me")


def sample(tokens: list[int] | None = None, text: str = "yes") -> FinishedChoice:
    tokens = [7, 8, 9] if tokens is None else tokens
    logprobs = [-0.1 * (i + 1) for i in range(len(tokens))]
    return FinishedChoice("x", 0, text, tokens, logprobs, "stop", None, {"n": 1})


def add(ledger: Ledger, number: int, prompt: list[int], text: str = "yes", **request: object) -> str:
    """One recorded choice; returns its id."""
    announced = dataclasses.replace(REQUEST, request_id=f"{number:032x}", **request)  # type: ignore[arg-type]
    with ledger.open_request(announced) as opened:
        ledger.take_prompt(announced.request_id, 0, prompt)
        ledger.take_samples([(announced.request_id, 0, 0, sample(text=text))])
        return opened.records[0].choice_id
