"""The ledger's file of commit 72080d0 opens: its records are found, trained and continued.

`data/72080d0.sql` was written by this commit's ledger with the embedded model's tokenizer: three turns in the session
"s" whose answer "maybe" was sampled letter by letter, three without a session, and a tool call with thinking that the
agent did not return, with the answer behind its result.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from art_server.errors import UsageError
from art_server.ledger import conversation
from art_server.ledger.earlier import number_records
from art_server.ledger.ledger import Ledger
from art_server.ledger.records import Request
from art_server.ledger.sessions import session_trajectory
from art_server.shared.engine_messages import FinishedChoice
from art_server.store.base_facts import read_facts
from art_server.store.base_models import TINY_DIR

DUMP = Path(__file__).with_name("data") / "72080d0.sql"
QUESTION = {"role": "user", "content": "respond with yes, no, maybe"}
ANSWER = {"role": "assistant", "content": "maybe"}


def number_of(project: str, name: str) -> int:
    return {("p", "a"): 7}[project, name]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        db.executescript(DUMP.read_text())
    for _ in range(2):  # the second time there is nothing to change
        number_records(tmp_path / "ledger.sqlite", number_of)
        Ledger(tmp_path / "ledger.sqlite").close()
    opened = Ledger(tmp_path / "ledger.sqlite")
    opened.use_tokenizer(TINY_DIR, read_facts(TINY_DIR))
    return opened


def test_records_are_found_with_their_prompts(ledger: Ledger) -> None:
    records = [ledger.find(f"{number:032x}-0") for number in range(1, 9)]
    links = [record and record.link for record in records]
    assert links == [None, "spliced", "spliced"] * 2 + [None, "spliced"]
    for earlier, later in ((0, 1), (1, 2), (6, 7)):
        past, record = records[earlier], records[later]
        assert past is not None and record is not None
        whole = past.prompt_token_ids + past.token_ids
        assert record.prompt_token_ids[: len(whole)] == whole
    text = ledger.decode(records[7].prompt_token_ids) if records[7] else None
    assert text is not None and "plan\n</think>" in text


def test_answers_are_found_by_log_probabilities_and_by_their_conversation(ledger: Ledger) -> None:
    record = ledger.find(f"{5:032x}-0")
    assert record is not None
    prefix, _ = conversation.past_answers([QUESTION, ANSWER, QUESTION])
    by_conversation = ledger.find_by_conversation(7, prefix, record.answer_digest)
    assert [match.choice_id[-3:] for match in by_conversation] == ["5-0", "2-0"]
    assert len(ledger.find_by_logprobs(7, record.logprobs)) == 7


def test_a_session_is_one_conversation(ledger: Ledger) -> None:
    reply = session_trajectory(ledger.find_session(7, "s"))
    assert reply.num_choices == 3 and len(reply.histories) == 1 and reply.unused == {}


@pytest.mark.parametrize("session", ["s", None])
def test_a_conversation_is_continued(ledger: Ledger, session: str | None) -> None:
    messages = [QUESTION, ANSWER] * 3 + [QUESTION]
    prefix, answers = conversation.past_answers(messages)
    request = Request("f" * 32, "chat", 7, 0, "p", session, prefix, answers=answers)
    tokenizer = AutoTokenizer.from_pretrained(TINY_DIR)
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with ledger.open_request(request) as opened:
        ledger.take_prompt(request.request_id, 0, list(rendered))
        sample = FinishedChoice("x", 0, "yes", [5], [-0.5], "stop", None, {"n": 1})
        ledger.take_samples([(request.request_id, 0, 0, sample)])
        record = opened.records[0]
    past = ledger.find(f"{3 if session else 6:032x}-0")
    assert past is not None and record.continues == past.choice_id
    whole = past.prompt_token_ids + past.token_ids
    assert record.link == "spliced" and record.prompt_token_ids[: len(whole)] == whole


def test_a_file_from_before_the_first_version_is_refused_and_kept(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        db.execute("CREATE TABLE records (choice_id TEXT, said BLOB, before BLOB)")
    with pytest.raises(UsageError, match=r"ledger\.sqlite was written by a version of art-server that this"):
        Ledger(tmp_path / "ledger.sqlite")
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        assert db.execute("SELECT COUNT(*) FROM records").fetchone() == (0,)


def test_a_server_that_is_killed_while_it_numbers_the_records_begins_again(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(file)) as db:
        db.executescript(DUMP.read_text())
        db.execute(
            "CREATE TABLE lost_choices (number INTEGER PRIMARY KEY, session TEXT, project TEXT, name TEXT, reason TEXT,"
            " num_choices INTEGER, UNIQUE (session, project, name, reason))"
        )
        db.execute("INSERT INTO lost_choices VALUES (1, 's', 'p', 'a', 'why', 3)")
        db.execute("ALTER TABLE records ADD COLUMN model INTEGER")
        db.execute("UPDATE records SET model = 7 WHERE number < 3")
        db.commit()
    number_records(file, number_of)
    with closing(Ledger(file)) as opened:
        assert len(opened.find_session(7, "s")) == 3 and opened.lost_choices(7, "s") == {"why": 3}
