"""From records to conversations, on a ledger without an engine."""

import hashlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from art_protocol.wire import NOT_DELIVERED, NOT_ENDED
from art_server.api.openai.streaming import add_deltas
from art_server.ledger import conversation
from art_server.ledger import ledger as ledger_module
from art_server.ledger import storage as storage_module
from art_server.ledger.ledger import Ledger
from art_server.ledger.records import PRUNED, UNRECORDED, Record
from art_server.ledger.sessions import ASKED_AGAIN, OF_NAMED_STEP
from art_server.ledger.speakers import PASSED_OVER
from art_server.shared import clock
from tests.quick.ledger.scripted_agent import USER, Agent, answers, said, shape


def test_a_conversation_that_goes_on_is_one_history(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "one")
    agent.ask([USER, said("one"), USER], "two")
    agent.ask([USER, said("one"), USER, said(" two\n"), USER], "three")
    reply = agent.reply()
    assert shape(reply) == ["uCuCuC"] and reply.num_choices == 3 and reply.unused == {}


def test_a_frozen_step_of_the_model_is_another_speaker(tmp_path: Path) -> None:
    """Two players: the newest step, and step 2 by name."""
    agent = Agent(tmp_path)
    buyer, seller = {"role": "system", "content": "buy"}, {"role": "system", "content": "sell"}
    agent.ask([buyer, USER], "ten")
    agent.ask([seller, {"role": "user", "content": "ten"}], "twelve", step=2)
    agent.ask([buyer, USER, said("ten"), {"role": "user", "content": "twelve"}], "eleven")
    reply = agent.reply()
    assert shape(reply) == ["suCuC"] and reply.num_choices == 2
    assert reply.unused == {OF_NAMED_STEP: 1}


def test_a_session_that_names_a_step_in_all_requests_is_an_evaluation(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "one", step=2)
    agent.ask([USER, said("one"), USER], "two", step=2)
    reply = agent.reply()
    assert shape(reply) == ["uCuC"] and reply.num_choices == 2 and reply.unused == {}


def test_sub_agents_and_branches_are_histories_of_their_own(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "plan")
    agent.ask([{"role": "system", "content": "sub"}, USER], "sub answer")
    agent.ask([USER, said("plan"), {"role": "user", "content": "left"}], "l")
    agent.ask([USER, said("plan"), {"role": "user", "content": "right"}], "r")
    reply = agent.reply()
    assert shape(reply) == ["uCuC", "uCuC", "suC"], "the main conversation began first"
    assert reply.num_choices == 4


def test_an_agent_that_adds_its_stop_string_to_an_answer_continues_it(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    stops = ["Observation:", "</code>"]
    first = [USER, said("<code>a</code>\nCalling tools: a"), USER]
    agent.ask([USER], "<code>a", stops=stops)
    agent.ask(first, "<code>b", stops=stops)
    agent.ask([*first, said("<code>b</code>"), USER], "<code>c", stops=stops)
    reply = agent.reply()
    assert shape(reply) == ["uCuCuC"] and reply.num_choices == 3 and reply.unused == {}
    # With another addition it is another conversation, not the same one again.
    agent.ask([USER, said("<code>a</code>\nCalling tools: b"), USER], "<code>d", stops=stops)
    assert shape(agent.reply()) == ["uCuCuC", "uCuC"]
    # Without the stop string in the request it is an edit.
    agent.ask([USER, said("<code>a</code>"), USER], "<code>e")
    assert shape(agent.reply()) == ["uCuCuC", "uCuC", "uauC"]


def test_few_shot_examples_are_not_taken_for_choices(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER, said("an example"), USER], "answer")
    assert shape(agent.reply()) == ["uauC"]


def test_a_retry_after_a_lost_answer_leaves_one(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "lost", delivered=False)
    agent.ask([USER], "found")
    agent.ask([USER, said("found"), USER], "end")
    reply = agent.reply()
    assert shape(reply) == ["uCuC"] and sum(reply.unused.values()) == 1


def test_an_answer_that_was_lost_ends_the_conversation_before_it(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "one")
    agent.ask([USER, said("one"), USER], "lost", delivered=False)
    reply = agent.reply()
    assert shape(reply) == ["uC"] and reply.num_choices == 1 and sum(reply.unused.values()) == 1


def test_a_choice_that_the_agent_did_not_see_end_is_left_out(tmp_path: Path) -> None:
    """Of a stream of two choices, whose client left between their ends."""
    agent = Agent(tmp_path)
    agent.ask([USER], "seen", unseen="unseen")
    assert len(agent.ledger.find_session(agent.number("a"), "s")) == 1
    assert agent.reply().num_choices == 1


def test_of_a_last_turn_that_is_asked_again_only_the_last_answer_counts(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "look")
    for text in ("{not json", "{not json", "still not", "{}"):
        agent.ask([USER, said("look"), USER], text)
    reply = agent.reply()
    assert answers(reply) == [["look", "{}"]]
    assert reply.num_choices == 2 and reply.unused == {ASKED_AGAIN: 3}


def test_answers_that_are_sampled_at_the_same_time_are_branches(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    times = [clock.tick() for _ in range(3)]
    for text, at in zip("abc", times, strict=True):
        agent.ask([USER], text, at=at)
    assert answers(agent.reply()) == [["a"], ["b"], ["c"]]


def test_of_partly_overlapping_requests_those_before_the_last_delivery_stay(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    first, second = clock.tick(), clock.tick()
    agent.ask([USER], "a", at=first)
    third = clock.tick()
    agent.ask([USER], "b", at=second)
    agent.ask([USER], "c", at=third)
    reply = agent.reply()
    assert answers(reply) == [["b"], ["c"]] and reply.unused == {ASKED_AGAIN: 1}


def test_an_agent_may_go_on_with_the_second_last_of_several_answers(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    for text in ("a", "b", "c"):
        agent.ask([USER], text)
    agent.ask([USER, said("b"), USER], "end")
    reply = agent.reply()
    assert answers(reply) == [["b", "end"]]
    assert sum(reply.unused.values()) == 2


def test_an_answer_that_is_continued_by_a_lost_request_only_is_not_passed_over(
    tmp_path: Path,
) -> None:
    agent = Agent(tmp_path)
    first, second = clock.tick(), clock.tick()
    agent.ask([USER], "a", at=first)
    agent.ask([USER], "b", at=second)
    agent.ask([USER, said("a"), USER], "lost", delivered=False)
    reply = agent.reply()
    assert answers(reply) == [["a"]]
    assert reply.unused == {PASSED_OVER: 1, NOT_DELIVERED: 1}


def test_a_repeat_that_never_came_discards_nothing(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "a")
    agent.ask([USER], "lost", delivered=False)
    reply = agent.reply()
    assert answers(reply) == [["a"]] and reply.unused == {NOT_DELIVERED: 1}


def test_a_retry_that_shows_the_error_continues_the_bad_answer(tmp_path: Path) -> None:
    """As instructor does: the policy reads its bad answer, so that answer is part of the conversation."""
    agent = Agent(tmp_path)
    error = {"role": "user", "content": "that is no JSON"}
    agent.ask([USER], "bad")
    agent.ask([USER, said("bad"), error], "worse")
    agent.ask([USER, said("bad"), error], "good")
    reply = agent.reply()
    assert answers(reply) == [["bad", "good"]] and reply.unused == {ASKED_AGAIN: 1}


def test_an_agent_that_begins_again_discards_its_first_attempt(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "plan")
    agent.ask([USER, said("plan"), USER], "bad end")
    agent.ask([USER], "other plan")
    agent.ask([USER, said("other plan"), USER], "good end")
    reply = agent.reply()
    assert answers(reply) == [["other plan", "good end"]] and reply.unused == {ASKED_AGAIN: 2}


def test_an_attempt_that_begins_again_and_ends_at_once_counts(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "plan")
    agent.ask([USER, said("plan"), USER], "bad end")
    agent.ask([USER], "good end")
    assert answers(agent.reply()) == [["good end"]]


def test_an_attempt_with_equal_answers_is_distinguished_from_the_one_before_it(tmp_path: Path) -> None:
    """Equal answers to one conversation: a request continues the one that was there, not the one that came later."""
    agent = Agent(tmp_path)
    for end in ("bad end", "good end"):
        agent.ask([USER], "plan")
        agent.ask([USER, said("plan"), USER], end)
    reply = agent.reply()
    assert answers(reply) == [["plan", "good end"]] and reply.unused == {ASKED_AGAIN: 2}


def test_other_white_space_is_another_question(tmp_path: Path) -> None:
    """Code with another indentation; the answer to it may differ."""
    agent = Agent(tmp_path)
    for code, answer in (("if a:\n  b\n  c", "1"), ("if a:\n  b\nc", "2")):
        agent.ask([{"role": "user", "content": code}], answer)
    assert answers(agent.reply()) == [["1"], ["2"]]
    agent.ask([{"role": "user", "content": "if a:\n  b\n  c"}], "3")
    reply = agent.reply()
    assert answers(reply) == [["2"], ["3"]] and reply.unused == {ASKED_AGAIN: 1}


def test_attempts_that_run_at_the_same_time_are_both_kept(tmp_path: Path) -> None:
    """Two sub-agents with the same task, one begun while the other had its first answer already."""
    agent = Agent(tmp_path)
    agent.ask([USER], "left")
    agent.ask([USER], "right")
    agent.ask([USER, said("left"), USER], "left end")
    agent.ask([USER, said("right"), USER], "right end")
    reply = agent.reply()
    assert answers(reply) == [["left", "left end"], ["right", "right end"]]
    assert reply.unused == {}


def test_the_same_messages_with_another_schema_or_other_tools_are_another_question(
    tmp_path: Path,
) -> None:
    agent = Agent(tmp_path)
    for name in ("Person", "Place"):
        agent.ask([USER], name, constraints={"response_format": {"json_schema": {"name": name}}})
    agent.ask([USER], "tool", tools=[{"type": "function", "function": {"name": "look"}}])
    assert answers(agent.reply()) == [["tool"], ["Person"], ["Place"]]


def test_conversations_are_in_the_order_of_their_first_requests(tmp_path: Path) -> None:
    """The second conversation's answer is recorded first, because it is shorter."""
    agent = Agent(tmp_path)
    first, second = clock.tick(), clock.tick()
    agent.ask([{"role": "user", "content": "short"}], "s", at=second)
    agent.ask([{"role": "user", "content": "long"}], "l", at=first)
    assert answers(agent.reply()) == [["l"], ["s"]]


def test_times_grow_across_restarts_although_the_clock_was_set_back(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    ahead = clock.tick() + 10**9
    agent.ask([USER], "bad", at=ahead)
    agent.ledger._storage.db.execute("UPDATE records SET delivered_at = ?", (ahead + 1,))
    agent.ledger.close()
    agent.ledger = Ledger(tmp_path / "l.sqlite")
    agent.ask([USER], "good")
    assert answers(agent.reply()) == [["good"]]


def test_projects_do_not_see_each_other_s_sessions(tmp_path: Path) -> None:
    """The same text, the same session name, another project."""
    mine, theirs = Agent(tmp_path), Agent(tmp_path, project="q")
    mine.ask([USER], "same")
    theirs.ask([USER], "same")
    theirs.ask([USER, said("same"), USER], "more")
    assert mine.reply().num_choices == 1
    assert theirs.reply().num_choices == 2


def test_a_malformed_stream_is_kept_and_continued_as_the_agent_received_it(tmp_path: Path) -> None:
    """vLLM's streaming parser made another call of it than the whole text holds."""
    agent = Agent(tmp_path)
    events = [
        {"role": "assistant", "content": ""},
        {"tool_calls": [{"index": 0, "id": "call-1", "function": {"name": "look"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": <thi'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "nk>1"}}]},
    ]
    received: dict[int, dict[str, Any]] = {}
    for number, delta in enumerate(events):
        part = {"index": 0, "delta": delta, "finish_reason": "stop" if number == 3 else None}
        add_deltas(received, b"data: " + json.dumps({"choices": [part]}).encode() + b"\n\n")
    add_deltas(received, b"data: [DONE]\n\n")
    message = received[0]["message"]
    assert message["tool_calls"][0] == {
        "id": "call-1",
        "type": "function",
        "function": {"name": "look", "arguments": '{"a": <think>1'},
    }
    whole = '<tool_call>\n{"name": "look", "arguments": {"a": <think>1}}\n</tool_call>'
    agent.ask([USER], whole, received=message)
    agent.ask([USER, message, {"role": "tool", "content": "r"}], "done")
    (history,) = agent.reply().histories
    assert history.messages_and_choices[1]["message"] == message


def test_requests_are_served_while_a_long_session_is_read(tmp_path: Path) -> None:
    """The ledger's lock is taken for one turn at a time, because prompts wait for it."""
    agent = Agent(tmp_path)
    for number in range(9):
        agent.ask([{"role": "user", "content": f"q{number}"}], "yes")
    held: list[int] = []
    lock, load = agent.ledger._lock, agent.ledger._storage.find_heading

    class Counted:
        def __enter__(self) -> None:
            lock.__enter__()
            held.append(0)

        def __exit__(self, *error: Any) -> None:
            lock.__exit__(*error)

    def load_counted(choice_id: str) -> Record | None:
        held[-1] += 1
        return load(choice_id)

    agent.ledger._lock = Counted()  # type: ignore[assignment]
    agent.ledger._storage.find_heading = load_counted  # type: ignore[method-assign]
    assert len(agent.ledger.find_session(agent.number("a"), "s")) == 9
    assert sum(held) == 9 and max(held) == 1


def talk(agent: Agent, num_turns: int) -> None:
    """A conversation whose messages differ, with tools."""
    messages: list[dict[str, Any]] = []
    tools = [{"type": "function", "function": {"name": "look", "description": "d" * 500}}]
    for number in range(num_turns):
        noise = hashlib.sha256(f"{number}".encode()).hexdigest() * 8
        messages = [*messages, {"role": "user", "content": noise}]
        agent.ask(messages, f"answer {number}", tools=tools)
        messages = [*messages, said(f"answer {number}")]


def stored_bytes(agent: Agent) -> int:
    """What turns and their messages take."""
    database = agent.ledger._storage.db
    sums = [
        database.execute(f"SELECT TOTAL(LENGTH({column})) FROM {table}").fetchone()[0]
        for table, column in (("turns", "body"), ("conversations", "message"))
    ]
    return int(sum(sums))


def test_a_session_grows_with_its_conversation_and_not_with_its_square(tmp_path: Path) -> None:
    sizes: list[int] = []
    for number, num_turns in enumerate((10, 20, 40, 80)):
        (tmp_path / f"{number}").mkdir()
        agent = Agent(tmp_path / f"{number}")
        talk(agent, num_turns)
        sizes.append(stored_bytes(agent))
        (history,) = agent.reply().histories
        assert len(history.messages_and_choices) == 2 * num_turns
        assert history.tools is not None and len(history.tools) == 1
        (num,) = agent.ledger._storage.db.execute("SELECT COUNT(*) FROM conversations").fetchone()
        assert num == 2 * num_turns, "each message once (the last answer is no message), and the tools"
    assert all(2.1 * less > more for less, more in itertools.pairwise(sizes)), sizes


def test_a_long_session_is_read_without_its_beginning_for_each_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(tmp_path)
    talk(agent, 100)
    extended: list[bytes] = []
    extend = conversation.extend
    monkeypatch.setattr(conversation, "extend", lambda before, m: extended.append(before) or extend(before, m))
    assert agent.reply().num_choices == 100
    assert len(extended) == 200, "one for each message, and one for the tools"


def test_messages_stay_as_long_as_a_turn_needs_them(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    talk(agent, 3)
    agent.ask([USER], "alone")
    storage = agent.ledger._storage

    def count() -> int:
        return storage.db.execute("SELECT COUNT(*) FROM conversations").fetchone()[0]

    def drop(number: int) -> None:
        storage.drop([number], [])

    assert count() == 5 + 1 + 1
    drop(1)
    assert count() == 7, "later turns begin with the messages of the first"
    drop(3)
    assert count() == 5, "the last question and the answer before it are gone"
    assert agent.reply().num_choices == 2
    drop(2)
    assert count() == 1, "and then the whole conversation with its tools"
    assert answers(agent.reply()) == [["alone"]]
    drop(4)
    assert count() == 0


def test_choices_whose_records_were_deleted_are_counted(tmp_path: Path) -> None:
    """Also after all records of the session are gone."""
    agent = Agent(tmp_path)
    agent.ask([USER], "one")
    agent.ask([USER, said("one"), USER], "two")
    agent.ask([USER], "never came", delivered=False)
    storage = agent.ledger._storage
    storage.drop([1], [])
    reply = agent.reply()
    assert answers(reply) == [["two"]] and reply.unused == {PRUNED: 1, NOT_DELIVERED: 1}
    storage.drop([2, 3], [])
    assert agent.reply("b").unused == {}
    reply = agent.reply()
    assert reply.num_choices == 0 and reply.unused == {PRUNED: 2}


def test_the_number_of_sessions_with_deleted_records_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "COUNTED_SESSIONS", 2)
    agent = Agent(tmp_path)
    for number in range(3):
        agent.ledger._storage.count_lost(f"s{number}", agent.number("a"), PRUNED, 1)
    agent.ask([USER], "one")
    agent.ledger._storage.drop([1], [])
    (num,) = agent.ledger._storage.db.execute("SELECT COUNT(*) FROM lost_choices").fetchone()
    assert num == 2 and agent.reply().unused == {PRUNED: 1}


def test_answers_that_could_not_be_recorded_are_counted(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "one")
    agent.ledger._storage.db.execute("DELETE FROM turns")  # as after a disk was full for a moment
    assert agent.reply().unused == {UNRECORDED: 1}
    request = agent.ledger._storage.select("TRUE")[0].request
    with agent.ledger.open_request(request) as opened:
        opened.lose(0, "the disk is full")
        anyio.run(opened.mark_delivered)
    assert agent.reply().unused == {UNRECORDED: 2}


def test_a_request_that_is_answered_at_this_moment_is_a_request_of_the_session(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "one", session=None)
    unnamed = agent.ledger._storage.select("TRUE")[0].request
    named = replace(unnamed, session="s")
    with agent.ledger.expecting(named, 1), agent.ledger.expecting(named, 2):
        reply = agent.reply()
        assert (reply.unused, reply.num_unnamed_requests) == ({NOT_ENDED: 3}, 0)
        assert agent.reply("b").unused == {}
    reply = agent.reply()
    assert (reply.unused, reply.num_unnamed_requests) == ({}, 1)


def test_requests_without_a_session_are_counted_where_the_session_has_none(tmp_path: Path) -> None:
    """Those of the model that were answered; not those of long ago."""
    agent = Agent(tmp_path)
    agent.ask([USER], "long ago", session=None, at=clock.tick() - 601_000_000)
    agent.ask([USER], "one", session=None, unseen="two")
    agent.ask([USER], "lost", session=None, delivered=False)
    agent.ask([USER], "of another", session=None, model="b")
    agent.ask([USER], "of another session", session="t")
    assert agent.reply().num_unnamed_requests == 1
    agent.ask([USER], "mine")
    assert agent.reply().num_unnamed_requests == 0


def test_requests_without_a_session_are_found_since_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that came later and was answered earlier than others, and in a ledger that is read in many parts."""
    monkeypatch.setattr(ledger_module, "CHANGED_AT_A_TIME", 2)
    agent = Agent(tmp_path)
    agent.ask([USER], "before", session=None)
    since = clock.tick()
    agent.ask([USER], "begins", at=since)
    for text in "abc":
        agent.ask([USER], text, session=None)
    unnamed = agent.ledger.find_unnamed(agent.number("a"), since)
    assert sorted(unnamed) == [f"{number:032x}-0" for number in (3, 4, 5)]
