"""Which requests go to the same engine: those of a session, and those whose prompts begin alike."""

from typing import Any

from art_server.inference_proxy import InferenceRequest, routing_key
from art_server.ledger import conversation


def key(
    *messages: tuple[str, str],
    model: str = "p/a",
    session: str | None = None,
    owner: str = "p",
    api: str = "chat",
    **body: Any,
) -> bytes:
    listed = [{"role": role, "content": content} for role, content in messages]
    body |= {"messages": listed} if api == "chat" else {}
    inference = InferenceRequest(api, f"/v1/{api}", model, body, {}, owner, None, None, session)
    inference.conversation = conversation.conversation_of(api, body)
    return routing_key(inference)


RULES, QUESTION = ("system", "rules"), ("user", "a question")


def test_a_groups_rollouts_and_all_turns_of_each_have_one_key() -> None:
    first = key(RULES, QUESTION)
    assert key(RULES, QUESTION, ("assistant", "yes"), ("user", "and then?")) == first
    assert key(RULES, QUESTION, ("assistant", "no"), ("user", "why?")) == first


def test_other_beginnings_have_other_keys() -> None:
    tool = {"type": "function", "function": {"name": "search"}}
    keys = [
        key(RULES, QUESTION),
        key(("system", "other rules"), QUESTION),
        key(QUESTION),
        key(RULES, ("user", "another question")),
        key(RULES, QUESTION, model="p/b"),
        key(RULES, QUESTION, tools=[tool]),
        key(RULES),
        key(api="completions", prompt=[1, 2, 3]),
    ]
    assert len(set(keys)) == len(keys)


def test_every_api_has_the_keys_of_its_messages() -> None:
    assert key(api="completions", prompt="a question") == key(QUESTION)
    assert key(api="responses", input="a question", instructions="rules") == key(RULES, QUESTION)


def test_a_session_has_one_key_whatever_it_asks() -> None:
    one = key(QUESTION, session="s")
    assert key(RULES, ("user", "something else"), session="s", model="p/b") == one
    assert one not in (key(QUESTION, session="t"), key(QUESTION, session="s", owner="q"), key(QUESTION))
