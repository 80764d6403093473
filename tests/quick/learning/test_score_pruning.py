"""Retention of scores: texts go with the ledger's records, rows later, and no answer is trained twice meanwhile. How the
table is read."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from art_server.learning.scores import KEPT_SECONDS, READ_AT_A_TIME, NewScore, Scores
from art_server.store.server_database import open_server_database
from tests.fakes.clock import FakeClock
from tests.quick.learning.crowd import crowd

DAY = 86400.0
LIMIT = 7 * DAY
"""The ledger's age limit."""
NUMBERS = itertools.count()


class Table:
    """The scores of model 1, and their clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.database = open_server_database(None)
        self.scores = Scores(self.database, clock=self.clock)

    def score(self, choice: str) -> NewScore:
        return NewScore(
            model=1,
            target=f"answer {choice}",
            choices=[choice],
            step=0,
            names_step=False,
            user=f"u{next(NUMBERS)}",
            session=None,
            owner="me",
            name="thumb",
            value=1.0,
            texts={"comment": "so so"},
            client_id=None,
            digest="",
            made_at=None,
            answered_at=self.clock.now(),
            pinned=b"tokens",
        )

    def add(self, choice: str = "a-0") -> int:
        self.scores.add([self.score(choice)])
        return self.rows()[-1]["number"]

    def train(self, number: int, choice: str = "a-0") -> None:
        assert self.scores.queue([number], [choice], "job")
        self.scores.end_job("job", 1)

    def rows(self) -> list[Any]:
        return self.database.select("SELECT number, state, texts, pinned FROM scores ORDER BY number")


def test_texts_go_with_the_ledgers_records_and_rows_later() -> None:
    table = Table()
    table.train(table.add())
    table.clock.advance(LIMIT - 1)
    young = table.add("b-0")
    table.scores.prune(LIMIT)
    assert [row["texts"] for row in table.rows()] == ['{"comment": "so so"}'] * 2
    table.clock.advance(2)
    table.scores.prune(LIMIT)
    assert [row["texts"] for row in table.rows()] == ["{}", '{"comment": "so so"}']
    table.clock.advance(KEPT_SECONDS)
    table.scores.drop([young], "capped")
    table.scores.prune(LIMIT)
    assert [(row["number"], row["texts"]) for row in table.rows()] == [(young, "{}")]


def test_what_was_trained_stays_known_as_long_as_a_score_may_train_it() -> None:
    table = Table()
    table.train(table.add())
    table.clock.advance(LIMIT)
    waits = table.add("b-0")
    table.clock.advance(KEPT_SECONDS + 1)
    table.scores.prune(LIMIT)
    assert table.scores.untaken(["a-0"]) == set(), "a waiting score may have pinned the answer"
    table.scores.drop([waits], "capped")
    table.scores.prune(LIMIT)
    assert table.scores.untaken(["a-0"]) == {"a-0"} and len(table.rows()) == 1


def test_scores_that_wait_longer_than_the_policy_permits_are_dropped() -> None:
    table = Table()
    for number in range(600):
        table.add(f"{number}-0")
    table.clock.advance(LIMIT + 1)
    table.add("new-0")
    table.scores.drop_old(1, LIMIT)
    states = [(row["state"], row["pinned"] is None) for row in table.rows()]
    assert states == [("dropped", True)] * 600 + [("scored", False)]


def test_pruning_reads_what_it_prunes() -> None:
    table = Table()
    for number in range(1000):
        table.train(table.add(f"{number}-0"), f"{number}-0")
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 100
        return 0

    table.database.connection.set_progress_handler(count, 100)
    table.scores.prune(LIMIT)
    assert steps < 1000, "of 1,000 young scores it reads none"


@pytest.mark.anyio
async def test_a_server_prunes_scores_at_its_start(tmp_path: Path) -> None:
    async with crowd(tmp_path) as shop:
        await shop.score(await shop.answer(), comment="so so")
        retracted = (await shop.scores())[0]["id"]
        await shop.http.delete(f"/api/models/shop/helper/feedback/{retracted}")
    async with crowd(tmp_path, ledger_max_age_days=1e-9) as shop:
        while (await shop.scores())[0].get("comment"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_waiting_scores_are_read_in_parts_that_the_event_loop_can_wait_for() -> None:
    table = Table()
    num_scores = 2 * READ_AT_A_TIME + 1
    table.scores.add([table.score(f"{number}-0") for number in range(num_scores)])
    largest: list[int] = []
    select = table.database.select

    def counted(*arguments: Any) -> list[Any]:
        rows = select(*arguments)
        largest.append(len(rows))
        return rows

    table.database.select = counted  # type: ignore[method-assign]
    assert [score.target for score in table.scores.waiting(1)] == [f"answer {number}-0" for number in range(num_scores)]
    assert largest == [READ_AT_A_TIME, READ_AT_A_TIME, 1]
