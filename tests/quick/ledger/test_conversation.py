import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_server.ledger import conversation as c

arguments = st.dictionaries(st.text(min_size=1), st.one_of(st.text(), st.integers(), st.booleans()))


def call(name: str, value: dict[str, Any], indent: int | None = None) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(value, indent=indent, ensure_ascii=False)}
    return {"id": "call_1", "type": "function", "function": function}


@given(st.text(), st.text(min_size=1), arguments)
def test_a_parsed_tool_call_says_what_was_sampled(content: str, name: str, value: dict[str, Any]) -> None:
    """However the JSON was written, and whatever text stands before it."""
    content = content.replace("{", "").replace("<", "")
    sampled = f"<think>\nhm\n</think>\n\n{content}\n<tool_call>\n{json.dumps({'name': name, 'arguments': value})}\n</tool_call>"
    message = {"role": "assistant", "content": content, "tool_calls": [call(name, value, indent=2)]}
    assert c.text_digest(sampled) == c.message_digest(message)
    parsed = c.message_from(sampled)
    assert parsed["reasoning_content"] == "hm"
    assert c.message_digest(parsed) == c.message_digest(message)
    (tool_call,) = parsed["tool_calls"]
    assert json.loads(tool_call["function"]["arguments"]) == value


@given(st.text(), st.text())
def test_different_words_are_distinguished(one: str, two: str) -> None:
    is_same = "".join(one.split()) == "".join(two.split())
    if "{" not in one + two and "<" not in one + two and "[" not in one + two:
        assert (c.text_digest(one) == c.text_digest(two)) == is_same


def test_llama_s_parameters_are_arguments() -> None:
    assert c.text_digest('{"name": "f", "parameters": {"a": 1}}') == c.message_digest(
        {"tool_calls": [call("f", {"a": 1})]}
    )


@pytest.mark.parametrize(("before", "calls"), [("", 1), ("", 2), ("Let me see.\n", 2)])
def test_calls_in_a_json_list_are_the_message_that_a_parser_makes_of_them(before: str, calls: int) -> None:
    text = before + json.dumps([{"name": "f", "arguments": {"a": number}} for number in range(calls)])
    message = {"content": before, "tool_calls": [call("f", {"a": number}) for number in range(calls)]}
    assert c.text_digest(text) == c.message_digest(message) == c.message_digest(c.message_from(text))
    assert c.message_from(text)["content"] == before.strip()
    split = c.split_calls(text)
    assert split is not None and split[0] == before and len(split[1]) == calls


def test_a_conversation_s_name_grows_with_it() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": None, "tool_calls": [call("f", {})]},
    ]
    digests = c.prefix_digests(messages)
    assert len(set(digests)) == 4
    assert digests[3] == c.after(digests[2], c.text_digest('{"name": "f", "arguments": {}}'))
    plain = [{"role": "developer", "content": "s"}, {"role": "user", "content": "q"}]
    assert c.prefix_digests(plain) == digests[:3]


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_three_apis_tell_the_same_conversation(api: str) -> None:
    chat = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "let me see", "tool_calls": [call("f", {"a": 1})]},
            {"role": "tool", "tool_call_id": "call_1", "content": "42"},
        ]
    }
    anthropic = {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "42"}],
            },
        ],
    }
    responses = {
        "instructions": "s",
        "input": [
            {"role": "user", "content": "q"},
            {"type": "reasoning", "summary": []},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "let me see"}],
            },
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "42"},
        ],
    }
    body = {"chat": chat, "messages": anthropic, "responses": responses}[api]
    expected = c.prefix_digests(c.messages_of("chat", chat))
    assert c.prefix_digests(c.messages_of(api, body)) == expected


ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("api", "body", "is_first_turn"),
    [
        ("chat", {"messages": [{"role": "system", "content": "s"}, ASKED]}, True),
        ("chat", {"messages": [ASKED, ANSWERED, ASKED]}, False),
        ("chat", {"messages": [{"role": ["user"], "content": "q"}]}, False),
        ("messages", {"system": "s", "messages": [ASKED, ANSWERED]}, False),
        ("responses", {"input": "q"}, True),
        ("responses", {"input": [ASKED, {"type": "function_call", "call_id": "call_1", "name": "f"}]}, False),
        ("completions", {"prompt": "q"}, False),
        ("completions", {"prompt": [1, 2]}, True),
        ("completions", {"prompt": [[1], [2]]}, True),
        ("completions", {"prompt": ["q"]}, False),
    ],
)
def test_a_first_turn_can_continue_no_answer(api: str, body: dict[str, Any], is_first_turn: bool) -> None:
    """A text prompt can contain answers, token ids are used unchanged."""
    talk = c.conversation_of(api, body)
    assert talk.is_first_turn == is_first_turn
    assert talk.digest == c.prefix_digests(talk.messages)[-1]


@given(st.recursive(st.none() | st.text() | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_no_body_breaks_the_reading(value: Any) -> None:
    for api in ("chat", "messages", "responses", "completions"):
        for key in ("messages", "input", "prompt", "system"):
            for content in (value, [{"role": "assistant", "content": value, "tool_calls": value}]):
                talk = c.conversation_of(api, {key: content})
                assert talk.digest == c.prefix_digests(talk.messages)[-1]
