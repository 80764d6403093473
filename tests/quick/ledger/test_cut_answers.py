"""Answers that the limit of tokens cut, and that the agent dropped, as Claude Code does with an answer without text."""

from pathlib import Path
from typing import Any

import pytest

from art_server.ledger.cut_answers import CUT
from tests.quick.ledger.scripted_agent import USER, Agent, answers, said, shape

SYSTEM = {"role": "system", "content": "You are an agent."}
RESUME = {"role": "user", "content": "Output token limit hit. Resume directly."}
TOOLS = [{"type": "function", "function": {"name": "bash"}}]


def behind(messages: list[dict[str, Any]], is_merged: bool) -> list[dict[str, Any]]:
    """The conversation with the agent's request to resume, as its own message or at the end of the last one."""
    if not is_merged:
        return [*messages, RESUME]
    return [*messages[:-1], {"role": "user", "content": f"{messages[-1]['content']}{RESUME['content']}"}]


@pytest.mark.parametrize("is_merged", [False, True])
def test_attempts_that_were_cut_and_dropped_are_discarded(tmp_path: Path, is_merged: bool) -> None:
    agent = Agent(tmp_path)
    messages = [SYSTEM, USER]
    for attempt in range(3):
        agent.ask(messages, f"<think>{attempt}", finish="length", tools=TOOLS)
        messages = behind(messages, is_merged)
    agent.ask(messages, "ls", tools=TOOLS)
    agent.ask([*messages, said("ls"), USER], "end", tools=TOOLS)
    reply = agent.reply()
    assert answers(reply) == [["ls", "end"]] and reply.unused == {CUT: 3}


def test_a_cut_answer_in_the_middle_is_discarded_and_the_conversation_stays_one(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    first = [USER, said("call"), {"role": "tool", "content": "result"}]
    agent.ask([USER], "call")
    agent.ask(first, "<think>on and on", finish="length")
    agent.ask([*first, RESUME], "end")
    reply = agent.reply()
    assert shape(reply) == ["uCtuC"] and reply.unused == {CUT: 1}


def test_the_last_answer_and_one_that_the_agent_sends_back_count_although_they_were_cut(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "half", finish="length")
    agent.ask([USER, said("half"), RESUME], "the rest", finish="length")
    reply = agent.reply()
    assert answers(reply) == [["half", "the rest"]] and reply.unused == {}


def test_what_else_asks_behind_the_conversation_discards_nothing(tmp_path: Path) -> None:
    """An answer that ended by itself, a request with other tools such as a summary, and an agent that quotes."""
    for number, (finish, tools) in enumerate([("stop", TOOLS), ("length", None)]):
        (tmp_path / str(number)).mkdir()
        agent = Agent(tmp_path / str(number))
        agent.ask([USER], "an answer", finish=finish, tools=TOOLS)
        agent.ask([USER, RESUME], "another", tools=tools)
        assert sorted(answers(agent.reply())) == [["an answer"], ["another"]]


def test_requests_at_the_same_time_discard_nothing(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([USER], "half", finish="length", at=5)
    agent.ask([USER, RESUME], "another", at=6)
    assert sorted(answers(agent.reply())) == [["another"], ["half"]]


def test_a_question_that_begins_like_a_cut_one_is_another_question(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask([{"role": "user", "content": "What is 1"}], "half", finish="length")
    agent.ask([{"role": "user", "content": "What is 12"}], "another", finish="length")
    assert sorted(answers(agent.reply())) == [["another"], ["half"]]
