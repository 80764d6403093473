import asyncio
import contextlib
import dataclasses
import sqlite3
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from art_server.ledger import conversation
from art_server.ledger.candidates import Candidates
from art_server.ledger.intake import Intake
from art_server.ledger.ledger import RECORD_WAIT_SECONDS, Ledger, Retention
from art_server.ledger.records import Request
from art_server.ledger.storage import MAX_EQUAL
from art_server.process.background import Background
from art_server.shared.engine_messages import FinishedChoice
from art_server.shared.kept_set import pack_set
from tests.fakes.clock import FakeClock
from tests.quick.ledger.recorded_choices import REQUEST, add, sample


def test_a_sample_is_found_by_its_choice_id_also_after_a_restart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    with ledger.open_request(REQUEST) as opened:
        assert ledger.take_prompt(REQUEST.request_id, 0, [1, 2]) is None
        ledger.take_samples([(REQUEST.request_id, 1, 0, sample())])
        record = opened.records[1]
    ledger.close()
    ledger = Ledger(tmp_path / "l.sqlite")
    stored = ledger.find(f"{'f' * 32}-1")
    assert stored == dataclasses.replace(record, text="")
    assert stored is not None and stored.request == REQUEST
    assert (stored.prompt_token_ids, stored.token_ids) == ([1, 2], [7, 8, 9])
    assert stored.logprobs == [-0.1, -0.2, -0.30000000000000004]
    assert ledger.find("other") is None


def test_a_sample_that_nobody_asked_for_is_not_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    assert ledger.take_prompt("0" * 32, 0, [1]) is None
    ledger.take_samples([("0" * 32, 0, 0, sample())])
    assert ledger.find(f"{'0' * 32}-0") is None


def first_turn(tokens: list[int], prompt: list[int], sampling: Any = None) -> FinishedChoice:
    return dataclasses.replace(sample(tokens), rendered=prompt, sampling=sampling or {"n": 1})


def test_a_first_turn_brings_its_prompt_with_its_samples(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    with ledger.open_request(REQUEST):
        told = [(REQUEST.request_id, i, 0, first_turn([7 + i], [1, 2])) for i in range(2)]
        ledger.take_samples(told)
    for index in range(2):
        stored = ledger.find(f"{'f' * 32}-{index}")
        assert stored is not None and stored.prompt_token_ids == [1, 2]
        assert stored.token_ids == [7 + index]


def test_samples_that_cannot_be_written_leave_nothing_behind(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    other = dataclasses.replace(REQUEST, request_id="e" * 32)
    with ledger.open_request(REQUEST) as opened, ledger.open_request(other):
        good = (REQUEST.request_id, 0, 0, first_turn([7], [1, 2]))
        bad = (other.request_id, 0, 0, first_turn([8], [1, 3], sampling={"n": object()}))
        with pytest.raises(TypeError):
            ledger.take_samples([good, bad])
        assert not opened.records
        assert ledger.find(f"{'f' * 32}-0") is None
        # The next prompt gets the number of the one that came to nothing, and is itself.
        following = ledger.find(add(ledger, 9, [4, 5, 6]))
        assert following is not None and following.prompt_token_ids == [4, 5, 6]
        # Told again, the first comes with its own prompt.
        ledger.take_samples([good])
        assert opened.records[0].prompt_token_ids == [1, 2]
        assert ledger.find(f"{'f' * 32}-0") == dataclasses.replace(opened.records[0], text="")


def test_answers_are_found_within_their_model(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    first, second = add(ledger, 1, [1]), add(ledger, 2, [1, 2])
    add(ledger, 3, [1], model=2)
    add(ledger, 4, [1], text="no")
    answer = conversation.text_digest(" yes\n")
    matches = ledger.find_by_conversation(1, conversation.EMPTY, answer)
    assert [match.choice_id for match in matches] == [second, first]
    assert ledger.find_by_conversation(1, answer, answer) == []
    assert len(ledger.find_by_logprobs(1, [-0.1, -0.2, -0.3])) == 3
    assert ledger.find_by_logprobs(1, [-0.1, -0.2, -0.4]) == []


def num_steps(ledger: Ledger, call: Callable[[], object]) -> int:
    """How many tens of SQLite's instructions a call takes."""
    taken: list[None] = []
    ledger._storage.db.set_progress_handler(lambda: taken.append(None), 10)
    call()
    ledger._storage.db.set_progress_handler(None, 0)
    return len(taken)


def test_a_frequent_answer_is_found_without_reading_all_of_them(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    for number in range(600):
        add(ledger, number, [1, 2], prefix_digest=number.to_bytes(16))
    answer, prefix = conversation.text_digest("yes"), (7).to_bytes(16)
    matches = ledger.find_by_conversation(1, prefix, answer)
    assert [match.choice_id for match in matches] == [f"{7:032x}-0"]
    assert num_steps(ledger, lambda: ledger.find_by_conversation(1, prefix, answer)) < 30
    rare = [-0.1, -0.2, -0.4]
    assert num_steps(ledger, lambda: ledger.find_by_logprobs(1, rare)) < 30
    common = [-0.1, -0.2, -0.3]
    assert num_steps(ledger, lambda: ledger.find_by_logprobs(1, common)) > 300


def test_a_turn_of_a_frequent_conversation_is_continued_without_reading_all_of_them(
    tmp_path: Path,
) -> None:
    """By its session, or by its digests, of which the newest count."""
    ledger = Ledger(tmp_path / "l.sqlite")
    for number in range(2000):
        add(ledger, number, [1, 2], session=f"s{number}")
    answer = conversation.PastAnswer(conversation.EMPTY, conversation.text_digest("yes"))
    for session, limit in (("s7", 60), (None, 2000)):
        request = dataclasses.replace(REQUEST, session=session, answers=[answer])

        def find(request: Request = request) -> list[Any]:
            return [*Candidates(ledger._storage, request).groups(lambda row: None)]

        assert len(find()[0][0]) == (1 if session else MAX_EQUAL)
        assert num_steps(ledger, find) < limit


def test_what_is_too_old_goes(tmp_path: Path) -> None:
    clock = FakeClock()
    ledger = Ledger(tmp_path / "l.sqlite", Retention(max_age_seconds=86_400), clock=clock)
    old = add(ledger, 1, [1])
    clock.advance(86_401)
    new = add(ledger, 2, [1])
    assert ledger.prune() == 1
    assert ledger.find(old) is None and ledger.find(new) is not None


def test_the_oldest_go_when_the_file_is_too_large(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite", Retention(max_bytes=400_000))
    names = [add(ledger, i, [i * 31 % 997 for _ in range(50)] + [i]) for i in range(1500)]
    ledger.prune()
    assert ledger._storage.size() <= 400_000
    assert ledger.find(names[0]) is None and ledger.find(names[-1]) is not None


def test_a_prompt_whose_past_is_dropped_stays_whole(tmp_path: Path) -> None:
    """A later turn is stored as what it continues plus what is new; the past may go before it does."""
    clock = FakeClock()
    ledger = Ledger(tmp_path / "l.sqlite", Retention(max_age_seconds=86_400), clock=clock)
    parent = add(ledger, 1, [1, 2])
    clock.advance(86_401)
    whole = [1, 2, 7, 8, 9, 10]
    later = add_later_turn(ledger, parent, whole)
    assert ledger.prune() == 1
    ledger._storage._prompts.clear()
    stored = ledger.find(later)
    assert stored is not None and stored.prompt_token_ids == whole


def add_later_turn(ledger: Ledger, parent: str, whole: list[int]) -> str:
    """The id of a choice whose prompt continues `parent`."""
    with ledger.open_request(REQUEST) as opened:
        prompt = ledger._make_prompt(opened, whole)
        prompt.link, prompt.continues = "exact", parent
        ledger._storage.db.execute("DELETE FROM prompts WHERE number = ?", (prompt.number,))
        prompt.number = ledger._storage.store_prompt(prompt)
        opened.prompts[0] = prompt
        ledger.take_samples([(REQUEST.request_id, 0, 0, sample())])
    select = "SELECT parent FROM prompts WHERE number = ?"
    assert ledger._storage.db.execute(select, (prompt.number,)).fetchone()[0] == parent
    return f"{REQUEST.request_id}-0"


def test_a_deletion_names_the_answers_that_continue_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    parent, other = add(ledger, 1, [1, 2]), add(ledger, 2, [1, 2])
    later = add_later_turn(ledger, parent, [1, 2, 7, 8, 9, 10])
    assert ledger.choices_of_request(1, f"{1:032x}") == [parent] and ledger.choices_of_request(2, f"{1:032x}") == []
    assert ledger.delete([parent]) == [later]
    assert ledger.find(parent) is None and ledger.find(other) is not None
    stored = ledger.find(later)
    assert stored is not None and stored.prompt_token_ids == [1, 2, 7, 8, 9, 10]


def test_a_prompt_that_is_with_the_engine_is_not_pruned(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    with ledger.open_request(REQUEST):
        ledger.take_prompt(REQUEST.request_id, 0, [1, 2, 3])
        ledger.prune()
        add(ledger, 1, [7, 8])
        ledger.take_samples([(REQUEST.request_id, 0, 0, sample())])
    ledger._storage._prompts.clear()
    stored = ledger.find(f"{REQUEST.request_id}-0")
    assert stored is not None and stored.prompt_token_ids == [1, 2, 3]


def test_prompts_of_abandoned_requests_cost_no_records(tmp_path: Path) -> None:
    """A client that gives up leaves a prompt without an answer. Their size does not drive out records."""
    ledger = Ledger(tmp_path / "l.sqlite", Retention(max_bytes=300_000))
    kept = [add(ledger, number, [1, number]) for number in range(10)]
    for number in range(100, 150):
        abandoned = dataclasses.replace(REQUEST, request_id=f"{number:032x}")
        with ledger.open_request(abandoned):
            ledger.take_prompt(abandoned.request_id, 0, list(range(number, number + 8000)))
    with ledger.open_request(REQUEST) as opened:
        ledger.take_prompt(REQUEST.request_id, 0, [5, 6])
        assert ledger._storage.size() > 300_000
        assert ledger.prune() == 0
        assert all(ledger.find(choice) is not None for choice in kept)
        (left,) = ledger._storage.db.execute("SELECT COUNT(*) FROM prompts").fetchone()
        assert left == 11
        ledger.take_samples([(REQUEST.request_id, 0, 0, sample())])
        assert opened.records[0].prompt_token_ids == [5, 6]


def test_a_database_that_is_locked_costs_its_records_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches are cleared only if a prompt of the transaction is undone, and a batch is tried once."""
    ledger = Ledger(tmp_path / "l.sqlite")
    cleared: list[None] = []
    monkeypatch.setattr(ledger._storage, "forget", lambda: cleared.append(None))
    first = dataclasses.replace(sample(), rendered=[1, 2], request_id=REQUEST.request_id)
    samples = [first, dataclasses.replace(first, index=1)]
    with (
        ledger.open_request(REQUEST) as opened,
        contextlib.closing(sqlite3.connect(tmp_path / "l.sqlite", isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        Intake(ledger, Background()).receiver()._take(samples)
        assert opened.lost == dict.fromkeys((0, 1), "database is locked") and not cleared
        other.execute("ROLLBACK")
        broken = dataclasses.replace(first, index=2, logprobs=[])
        Intake(ledger, Background()).receiver()._take([first, broken])
        assert opened.records.keys() == {0} and "log-probability" in opened.lost[2]


def test_the_number_of_a_pruned_prompt_is_not_given_again(tmp_path: Path) -> None:
    """The caches hold prompts by number."""
    ledger = Ledger(tmp_path / "l.sqlite")
    numbers: list[int] = []
    for rendered in ([1, 2, 3], [7, 8]):
        with ledger.open_request(REQUEST) as opened:
            ledger.take_prompt(REQUEST.request_id, 0, rendered)
            numbers.append(opened.prompts[0].number)
        ledger.prune()
    assert numbers[1] > numbers[0]


@pytest.mark.anyio
async def test_an_answer_waits_for_its_record(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    with ledger.open_request(REQUEST) as opened:
        ledger.take_prompt(REQUEST.request_id, 0, [1])
        waiting = asyncio.create_task(opened.wait(1))
        await asyncio.sleep(0.01)
        ledger.take_samples([(REQUEST.request_id, 0, 0, sample())])
        await asyncio.sleep(0.01)
        assert not waiting.done()
        ledger.take_samples([(REQUEST.request_id, 1, 0, sample())])
        record = await waiting
    assert record is not None and record.choice_id.endswith("-1")


LIST = pack_set(np.arange(5), 1408)
MASK = pack_set(np.arange(0, 1408, 2), 1408)


def add_sampled(ledger: Ledger, number: int, sets: list[bytes], **sampling: Any) -> str:
    """A recorded choice of three tokens that were sampled from `sets`, the middle one from all; returns its id."""
    request = dataclasses.replace(REQUEST, request_id=f"{number:032x}")
    told = dataclasses.replace(
        first_turn([7, 8, 9], [1, 2], sampling),
        sampled_logprobs=[-0.5, -1.0, -0.25],
        kept=[0, -1, len(sets) - 1],
        sets=sets,
    )
    with ledger.open_request(request) as opened:
        ledger.take_samples([(request.request_id, 0, 0, told)])
        return opened.records[0].choice_id


def num_sets(ledger: Ledger) -> int:
    return ledger._storage.db.execute("SELECT COUNT(*) FROM kept_sets").fetchone()[0]


def test_what_tokens_were_sampled_from_is_found_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    name = add_sampled(ledger, 1, [LIST, MASK], top_k=20, structured=True)
    other = add(ledger, 2, [1])
    ledger.close()
    ledger = Ledger(tmp_path / "l.sqlite")
    scored, plain = ledger.find(name), ledger.find(other)
    assert scored is not None and plain is not None
    assert scored.sampled_logprobs == [-0.5, -1.0, -0.25]
    assert (scored.kept, scored.sets) == ([0, -1, 1], [LIST, MASK])
    assert (plain.sampled_logprobs, plain.kept, plain.sets) == (None, [], [])


def test_raw_figures_are_stored_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    told = dataclasses.replace(first_turn([7, 8], [1]), sampled_logprobs=[-0.1, -0.2])
    with ledger.open_request(REQUEST):
        ledger.take_samples([(REQUEST.request_id, 0, 0, told)])
    record = ledger.find(f"{REQUEST.request_id}-0")
    assert record is not None and record.sampled_logprobs == record.logprobs == [-0.1, -0.2]
    (stored,) = ledger._storage.db.execute("SELECT sampled_from FROM records").fetchone()
    assert stored == b""


def test_sets_that_other_choices_have_too_are_stored_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    names = [add_sampled(ledger, i, [LIST, MASK], structured=True) for i in range(3)]
    assert num_sets(ledger) == 2
    # top_p hardly leaves the same few ids twice: they stay with their choice.
    names.append(add_sampled(ledger, 9, [LIST, MASK], top_p=0.8))
    assert num_sets(ledger) == 2
    for name in names:
        record = ledger.find(name)
        assert record is not None and record.sets == [LIST, MASK]


def test_sets_of_dropped_choices_go_and_others_stay(tmp_path: Path) -> None:
    clock = FakeClock()
    ledger = Ledger(tmp_path / "l.sqlite", Retention(max_age_seconds=1.0), clock=clock)
    add_sampled(ledger, 1, [LIST])
    add_sampled(ledger, 2, [MASK])
    clock.advance(8000)  # both are old; MASK is used by a choice of this hour, too
    recent = add_sampled(ledger, 3, [MASK])
    assert num_sets(ledger) == 2
    assert ledger.prune() == 2
    assert num_sets(ledger) == 1
    record = ledger.find(recent)
    assert record is not None and record.sets == [MASK]
    clock.advance(8000)
    assert ledger.prune() == 1
    assert num_sets(ledger) == 0


def test_figures_of_what_was_sampled_travel_on_the_line() -> None:
    """Bytes as base64, floats to the bit."""
    told = dataclasses.replace(
        sample([7, 8]), sampled_logprobs=[float(np.float32(-0.1)), -2.0], kept=[0, -1], sets=[MASK]
    )
    assert msgspec.json.decode(msgspec.json.encode(told), type=FinishedChoice) == told


@pytest.mark.anyio
async def test_an_answer_waits_once_for_all_of_its_records(tmp_path: Path) -> None:
    """A thousand choices without records would else wait a thousand times."""
    clock = FakeClock()
    ledger = Ledger(tmp_path / "l.sqlite", clock=clock)
    with ledger.open_request(REQUEST) as opened:
        waiting = asyncio.create_task(opened.wait(0))
        await clock.end(RECORD_WAIT_SECONDS)
        assert await waiting is None
        for index in range(1, 1000):
            assert await opened.wait(index) is None
        assert len(opened.lost) == 1000 and "no record came" in opened.lost[999]


@pytest.mark.anyio
async def test_a_record_from_a_machine_whose_network_stalls_is_waited_for(tmp_path: Path) -> None:
    clock = FakeClock()
    ledger = Ledger(tmp_path / "l.sqlite", clock=clock)
    with ledger.open_request(REQUEST, silence_seconds=600.0) as opened:
        waiting = asyncio.create_task(opened.wait(0))
        await clock.reach(RECORD_WAIT_SECONDS + 600.0)
        clock.advance(RECORD_WAIT_SECONDS + 599.0)
        assert ledger.take_prompt(REQUEST.request_id, 0, [1, 2]) is None
        ledger.take_samples([(REQUEST.request_id, 0, 0, sample())])
        record = await waiting
    assert record is not None and opened.lost == {}


def test_an_open_request_holds_few_bytes_for_each_token_of_its_prompt(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite")
    rendered = [300 + number % 200 for number in range(50_000)]
    with ledger.open_request(REQUEST):
        tracemalloc.start()
        ledger.take_prompt(REQUEST.request_id, 0, rendered)
        ledger._storage.forget()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert held < 8 * len(rendered)
