"""From records to conversations, on a ledger without an engine."""

import array
import itertools
import json
from pathlib import Path
from typing import Any

from art.wire import SessionReply
from art_server.api.streaming import add_deltas
from art_server.ledger import conversation
from art_server.ledger.ledger import Ledger
from art_server.ledger.records import Request
from art_server.ledger.sessions import session_trajectory
from art_server.shared.samples import Sample

USER = {"role": "user", "content": "q"}


class Agent:
    """Asks, and is told what the test says."""

    def __init__(self, path: Path, project: str = "p"):
        self.ledger = Ledger(path / "l.sqlite")
        self.project = project
        self._numbers = itertools.count(1 if project == "p" else 1000)

    def ask(
        self,
        messages: list[dict[str, Any]],
        said: str,
        delivered: bool = True,
        received: dict[str, Any] | None = None,
        unseen: str | None = None,
    ) -> None:
        request_id = f"{next(self._numbers):032x}"
        before = conversation.prefix_digests(messages)[-1]
        request = Request(request_id, "chat", self.project, "a", 0, self.project, "s", before)
        with self.ledger.open_request(request):
            self.ledger.take_prompt(request_id, 0, [1, 2])
            sample = Sample("x", 0, said, [3], [-1.0], "stop", None, {"n": 1})
            self.ledger.take_samples([(request_id, 0, 0, sample)])
            if unseen is not None:
                sample = Sample("x", 1, unseen, [4], [-1.0], "stop", None, {"n": 2})
                self.ledger.take_samples([(request_id, 1, 0, sample)])
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": received or {"role": "assistant", "content": said},
            "art": {"id": f"{request_id}-0"},
        }
        turn = {"messages": messages, "tools": None, "choices": {"0": choice}}
        self.ledger.keep_turn(request_id, turn)
        if delivered:
            self.ledger.mark_delivered(request_id)

    def reply(self) -> SessionReply:
        return session_trajectory(self.ledger.find_session(self.project, "a", "s"))


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def shape(reply: SessionReply) -> list[str]:
    """Each conversation as its roles, choices written in capitals."""
    return [
        "".join("C" if "finish_reason" in e else e["role"][0] for e in h.messages_and_choices)
        for h in reply.histories
    ]


def test_a_conversation_that_goes_on_is_one_history(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "one")
    agent.ask([USER, said("one"), USER], "two")
    agent.ask([USER, said("one"), USER, said(" two\n"), USER], "three")
    reply = agent.reply()
    assert shape(reply) == ["uCuCuC"] and reply.num_choices == 3 and reply.unused == {}


def test_sub_agents_and_branches_are_histories_of_their_own(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "plan")
    agent.ask([{"role": "system", "content": "sub"}, USER], "sub answer")
    agent.ask([USER, said("plan"), {"role": "user", "content": "left"}], "l")
    agent.ask([USER, said("plan"), {"role": "user", "content": "right"}], "r")
    reply = agent.reply()
    assert shape(reply) == ["uCuC", "uCuC", "suC"], "the main conversation began first"
    assert reply.num_choices == 4


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
    assert len(agent.ledger.find_session("p", "a", "s")) == 1
    assert agent.reply().num_choices == 1


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
    lock, load = agent.ledger._lock, agent.ledger._storage.load_prompt

    class Counted:
        def __enter__(self) -> None:
            lock.__enter__()
            held.append(0)

        def __exit__(self, *error: Any) -> None:
            lock.__exit__(*error)

    def load_counted(number: int) -> "array.array[int]":
        held[-1] += 1
        return load(number)

    agent.ledger._lock = Counted()  # type: ignore[assignment]
    agent.ledger._storage.load_prompt = load_counted  # type: ignore[method-assign]
    assert len(agent.ledger.find_session("p", "a", "s")) == 9
    assert sum(held) == 9 and max(held) == 1
