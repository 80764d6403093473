"""What the conversations of a session are: the agent's own, and what it asks beside it."""

from pathlib import Path
from typing import Any

from tests.quick.ledger.scripted_agent import Agent, said, shape

TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
RULES = "You are an agent that edits code. Read a file before you change the file, and run the tests when you have changed the file."
TITLE = [{"role": "system", "content": "You name conversations."}, {"role": "user", "content": "Mend the parser."}]
REVIEW = "You review a change, and report what is wrong with the change in at most three sentences."


def opening(first: str, system: str = RULES, date: str = "Monday") -> list[dict[str, Any]]:
    return [{"role": "system", "content": f"{system} Today is {date}."}, {"role": "user", "content": first}]


def work(agent: Agent, messages: list[dict[str, Any]], *answers: str) -> list[dict[str, Any]]:
    """A conversation of so many turns. Returns its messages."""
    for answer in answers:
        agent.ask(messages, answer, tools=TOOLS)
        messages = [*messages, said(answer), {"role": "user", "content": f"result of {answer}"}]
    return messages


def test_a_title_is_a_side_call_and_the_longest_conversation_is_the_main_one(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask(TITLE, "Parser")
    work(agent, opening("Mend the parser."), "ls", "cat", "done")
    reply = agent.reply()
    assert shape(reply) == ["suCuCuC", "suC"]
    assert reply.kinds == ["main", "side_call"]


def test_an_agent_s_conversation_of_one_answer_is_main_beside_a_title(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ask(TITLE, "Parser")
    work(agent, opening("Mend the parser."), "done")
    reply = agent.reply()
    assert reply.kinds == ["main", "side_call"]
    assert reply.histories[0].tools == TOOLS


def test_a_compaction_is_a_context_reset(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    before = work(agent, opening("Mend the parser."), "ls", "cat", "edit")
    agent.ask([*before, {"role": "user", "content": "Summarise the work."}], "the summary", tools=None)
    work(agent, opening("This goes on from: the summary", date="Tuesday"), "test", "done")
    reply = agent.reply()
    assert shape(reply) == ["suCuCuCuuC", "suCuC"]
    assert reply.kinds == ["main", "context_reset"]


def test_sub_agents_have_another_system_prompt_or_run_while_the_main_conversation_waits(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    before = work(agent, opening("Mend the parser."), "ls", "delegate")
    work(agent, opening("Look for the tests.", REVIEW), "grep", "found")
    work(agent, opening("Look where the parser is called from, in all folders."), "grep", "here")
    work(agent, before, "edit", "done")
    assert agent.reply().kinds == ["main", "sub_agent", "sub_agent"]


def test_another_way_to_go_on_is_a_branch_also_if_the_date_changed(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    first = opening("Mend the parser.")
    agent.ask(first, "ls", tools=TOOLS, at=1)
    agent.ask(first, "cat", tools=TOOLS, at=1)
    work(agent, opening("Mend the parser.", date="Tuesday"), "pwd", "done")
    assert agent.reply().kinds == ["main", "branch", "branch"]


def test_without_tools_and_system_prompts_a_question_of_its_own_is_a_context_reset(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    for question in ("What is 2 and 3?", "Name a river."):
        agent.ask([{"role": "user", "content": question}], "an answer")
    assert agent.reply().kinds == ["main", "context_reset"]
