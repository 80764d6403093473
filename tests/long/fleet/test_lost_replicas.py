"""Replicas that are killed or hang under requests of all APIs: none is lost, and each answer has its records."""

import asyncio
import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from art_server.ledger.ledger import Ledger
from art_server.ledger.records import Record
from tests.live import PROJECT, register, sampled_group, train
from tests.long.fleet.fleets import CHILD, CORE, IS_FULL, WORKER, FleetServer, Outcome, ask, kill, stop
from tests.waiting import PATIENCE_SECONDS, until, wait_until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"),
]

NUM_REQUESTS, AT_A_TIME = 3000 if IS_FULL else 300, 32
FAULTS = [(kill, CORE), (stop, WORKER), (kill, CHILD), (kill, WORKER), (stop, CHILD), (kill, CORE), (kill, CHILD)]
NUM_FAULTS = len(FAULTS) if IS_FULL else 2
MODEL = "lost"
MEAN_GAP, MAX_GAP = 4e-5, 4e-4
"""The limits of --exact."""


async def test_no_request_is_lost_and_each_answer_has_its_records(tmp_path: Path) -> None:
    server = FleetServer(tmp_path)
    server.arguments = ["--base-model", "art/tiny", "--exact", "--max-seq-length", "512"]
    with server.running():
        server.wait_all_ready()
        register(server, MODEL)
        await asyncio.to_thread(make_step, server)
        outcome = Outcome()
        limits = httpx.Limits(max_connections=AT_A_TIME)
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS, limits=limits) as http:
            await ask_under_faults(server, http, outcome)
            await asyncio.to_thread(server.wait_all_ready)
            records = stored(server)
            print(f"{outcome.choices} answered, {outcome.lost_streams} begun streams lost, {len(records)} records")
            assert outcome.wrong == []
            assert Counter(record.request.api for record in records) == outcome.choices, "as many records as answers"
            assert set(outcome.ids) <= {record.choice_id for record in records}
            assert {record.request.step for record in records} == {1, 2}
            gaps = [gap for record_gaps in await scored_again(http, records) for gap in record_gaps]
            print(f"{len(gaps)} tokens scored again: {sum(gaps) / len(gaps):.2g} on average, {max(gaps):.2g} at most")
            assert sum(gaps) / len(gaps) <= MEAN_GAP and max(gaps) <= MAX_GAP


def make_step(server: FleetServer) -> None:
    """Trains on answers of a session of their own."""
    with httpx.Client(base_url=f"{server.url}/s/training", timeout=PATIENCE_SECONDS) as sampling:
        group = sampled_group(sampling, f"{PROJECT}/{MODEL}")
    with server.client() as client:
        assert train(client, MODEL, [group])[-1]["event"] == "done"


async def ask_under_faults(server: FleetServer, http: httpx.AsyncClient, outcome: Outcome) -> None:
    """All requests, with faults and a step in between; the last quarter comes after the step."""
    numbers, num_ended, has_stepped = iter(range(NUM_REQUESTS)), 0, asyncio.Event()

    async def keep_asking() -> None:
        nonlocal num_ended
        for number in numbers:
            if number >= NUM_REQUESTS * 3 // 4:
                await has_stepped.wait()
            await ask(http, number, f"{PROJECT}/{MODEL}", outcome)
            num_ended += 1

    async def do_harm() -> None:
        for index, (fault, mark) in enumerate(FAULTS[:NUM_FAULTS], start=1):
            await reached(index / (NUM_FAULTS + 1))
            await asyncio.to_thread(server.wait_all_ready)
            await asyncio.to_thread(harm, index % 2, fault, mark)

    def harm(number: int, fault: Callable[[FleetServer, int, str], None], mark: str) -> None:
        starts = server.replicas()[number]["num_starts"]
        fault(server, number, mark)
        wait_until(lambda: server.replicas()[number]["num_starts"] > starts, server.log_tail)

    async def step() -> None:
        await reached(0.5)
        await asyncio.to_thread(make_step, server)
        has_stepped.set()

    async def reached(share: float) -> None:
        await until(lambda: num_ended >= NUM_REQUESTS * share)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_A_TIME):
            tasks.create_task(keep_asking())
        tasks.create_task(do_harm())
        tasks.create_task(step())


def stored(server: FleetServer) -> list[Record]:
    """The records of answers that were delivered, but for those of the session that was trained."""
    file = server.path / "art" / ".server" / "ledger.sqlite"
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT choice_id FROM records WHERE is_delivered AND session IS NULL").fetchall()
    with closing(Ledger(file)) as ledger:
        records = [ledger.find(choice_id) for (choice_id,) in rows]
        return [record for record in records if record is not None]


async def scored_again(http: httpx.AsyncClient, records: list[Record]) -> list[list[float]]:
    """The differences of each record's log-probabilities to those of its tokens under the step that its answer names."""
    slots = asyncio.Semaphore(AT_A_TIME)

    async def score(record: Record) -> list[float]:
        body = {
            "model": f"{PROJECT}/{MODEL}@{record.request.step}",
            "prompt": record.prompt_token_ids + record.token_ids,
            "max_tokens": 1,
            "prompt_logprobs": 0,
        }
        async with slots:
            response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        scores = json.loads(response.text)["choices"][0]["prompt_logprobs"][len(record.prompt_token_ids) :]
        again = [entry[str(token)]["logprob"] for entry, token in zip(scores, record.token_ids, strict=True)]
        return [abs(a - b) for a, b in zip(again, record.logprobs, strict=True)]

    return list(await asyncio.gather(*map(score, records)))
