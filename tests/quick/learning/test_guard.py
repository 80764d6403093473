"""The guard's comparison of a new step's answers with those of the step that serves."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from art_server.engine.engine import AdapterRefused
from art_server.learning.answerer import Answerer
from art_server.learning.guard import NUM_ANSWERS, Answer, Guard, compare, earlier_step
from art_server.ledger.ledger import Ledger
from art_server.store.registry import RegisteredModel

GOOD = Answer(length=8, is_cut=False, is_empty=False, is_invalid=False, divergence=0.4)


def answers(num_changed: int = 0, **changes: Any) -> list[Answer]:
    changed = [replace(GOOD, **changes)] * num_changed
    return [*changed, *[GOOD] * (NUM_ANSWERS - num_changed)]


FAULTS: dict[str, tuple[list[Answer], str]] = {
    "without end": (
        answers(40, is_cut=True),
        "62% of its answers to recorded prompts are cut at their limit, and 0% of those",
    ),
    "empty": (answers(20, is_empty=True), "31% of its answers to recorded prompts are empty"),
    "broken calls": (answers(20, is_invalid=True), "begin a tool call that cannot be read"),
    "long": (answers(64, length=20), "have 20.0 tokens on average, and those of the step that serves 8.0"),
    "short": (answers(64, length=3), "have 3.0 tokens on average"),
    "far away": (answers(64, divergence=12.0), "are 1.50 nats a token less likely for the step that serves"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_broke_is_refused_with_the_numbers(fault: str) -> None:
    new, reason = FAULTS[fault]
    assert reason in (compare(new, answers(), max_kl=1.0) or "")


@pytest.mark.parametrize(
    ("new", "serving"),
    [
        (answers(), answers()),
        (answers(5, is_cut=True), answers()),
        (answers(20, is_cut=True), answers(14, is_cut=True)),
        (answers(1, length=900), answers()),
        (answers(), answers(30, is_empty=True)),
    ],
    ids=["equal", "a few", "as often as chance", "one long answer", "better"],
)
def test_what_chance_does_is_no_fault(new: list[Answer], serving: list[Answer]) -> None:
    assert compare(new, serving, max_kl=1.0) is None


BROKEN = -1


class Asked:
    """Stands for the model, the ledger and the answerer: of each step's answers so many are cut."""

    number = 1

    def __init__(self, num_cut: dict[int, int]) -> None:
        self.num_cut = num_cut
        self.in_use: list[int] = []

    def steps(self) -> list[int]:
        return list(self.num_cut)

    def adapter_name(self, step: int) -> str:
        return f"shop/helper@{step}"

    def has(self, step: int) -> bool:
        return step in self.num_cut

    def find_recent(self, model: int, limit: int) -> list[Any]:
        return [SimpleNamespace(prompt_token_ids=[1, 2], token_ids=[3], sampling={})]

    @contextlib.contextmanager
    def kept(self, model: object, step: int) -> Iterator[None]:
        self.in_use.append(step)
        yield

    async def complete(self, model: object, step: int, body: dict[str, Any]) -> dict[str, Any]:
        if self.num_cut[step] == BROKEN:
            raise AdapterRefused("no adapter")
        is_cut = body["seed"] < self.num_cut[step]
        return {"token_ids": [3], "text": "no", "finish_reason": "length" if is_cut else "stop"}

    async def logprobs(self, model: object, step: int, prompt: list[int], sampled: list[int]) -> list[float]:
        return [-1.0]


@pytest.mark.parametrize(
    ("num_cut", "reason"),
    [
        (
            {0: 64, 1: 0, 9: 10, 10: 14},
            "22% of its answers to recorded prompts are cut at their limit, and 0% of those of step 1",
        ),
        ({0: 64, 9: 10, 10: 14}, None),
        ({9: 10, 10: 14}, None),
        ({0: 64, 1: 0, 9: 0, 10: 6}, None),
        ({1: BROKEN, 9: 10, 10: 14}, None),
    ],
    ids=["decays slowly", "was worse earlier", "has no earlier step", "is good", "the earlier step's files are broken"],
)
def test_a_step_is_compared_with_an_earlier_one_too(num_cut: dict[int, int], reason: str | None) -> None:
    asked = Asked(num_cut)
    guard = Guard(ledger=cast(Ledger, asked), answerer=cast(Answerer, asked))
    refused = asyncio.run(guard.why_refused(cast(RegisteredModel, asked), 10, 9, 1.0))
    assert refused == reason
    assert asked.in_use == [earlier_step(num_cut, 9)], "the step is not deleted meanwhile"


@pytest.mark.parametrize(
    ("steps", "serving", "earlier"),
    [([0, 1, 2, 3], 3, 0), (range(30), 20, 12), ([0, 5, 14, 20, 21], 20, 5), ([19, 20, 21], 20, 19), ([], 4, 4)],
)
def test_the_earlier_step_is_eight_steps_older_or_the_next_that_is_kept(steps, serving: int, earlier: int) -> None:
    assert earlier_step(steps, serving) == earlier
