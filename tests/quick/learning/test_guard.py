"""The guard's comparison of a new step's answers with those of the step that serves."""

from dataclasses import replace
from typing import Any

import pytest

from art_server.learning.guard import NUM_ANSWERS, Answer, compare

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
