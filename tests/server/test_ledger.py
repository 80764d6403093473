import asyncio
from pathlib import Path

import pytest

from art_server.engine.records import Sample
from art_server.ledger.ledger import Ledger, Request

REQUEST = Request("f" * 32, "chat", "p", "a", 3, "me")


def sample(index: int = 0, size: int = 3) -> Sample:
    tokens, logprobs = list(range(size)), [-0.1 * i for i in range(size)]
    return Sample("x", index, "p/a@3", [9, 8], tokens, logprobs, "stop", None, {"n": 1})


def test_a_sample_is_found_by_its_choice_id_also_after_a_restart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    with ledger.open_request(REQUEST) as opened:
        ledger.receive(sample(1), REQUEST.request_id, 1)
        record = opened.records[1]
    ledger.close()
    ledger = Ledger(tmp_path / "l.sqlite")
    found = ledger.find(f"{'f' * 32}-1")
    assert found == record
    assert found is not None and found.request == REQUEST and found.logprobs == [-0.0, -0.1, -0.2]
    assert ledger.find("other") is None


def test_a_sample_that_nobody_asked_for_is_not_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.receive(sample(), "0" * 32, 0)
    assert ledger.find(f"{'0' * 32}-0") is None


@pytest.mark.anyio
async def test_an_answer_waits_for_its_record(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    with ledger.open_request(REQUEST) as opened:
        waiting = asyncio.create_task(opened.wait(1))
        await asyncio.sleep(0.01)
        ledger.receive(sample(0), REQUEST.request_id, 0)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        ledger.receive(sample(1), REQUEST.request_id, 1)
        record = await waiting
    assert record is not None and record.choice_id.endswith("-1")
