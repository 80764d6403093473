"""Which assistant's messages are a recorded answer that the agent edited, and which are another answer."""

import json
from typing import Any

import pytest

from art_server.ledger.edits import is_edit

TEXT = "Paris has been the capital of France since the tenth century, with a few interruptions in wars."
OTHER = "The capital of France is Paris. It became the capital in 987, and apart from some wars it has stayed so."


def text(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str, arguments: Any, content: str | None = None) -> dict[str, Any]:
    return text(
        content, tool_calls=[{"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}]
    )


QUERY = {"city": "Paris", "days": 3}

EDITS = [
    ("one character of JSON", text('{"a" 1}'), text('{"a": 1}')),
    ("one letter", text("Pariis"), text("Paris")),
    ("one number of a sentence", text("There are 4 files."), text("There are 5 files.")),
    ("quotes", text("{'a': 'b'}"), text('{"a": "b"}')),
    ("another case", text("Yes"), text("YES!")),
    ("white space", text(" a  b\n"), text("ab a b"[3:])),
    ("the end is cut", text(TEXT), text(TEXT[:20])),
    ("only the last word is kept", text(TEXT), text("wars")),
    ("nothing is kept", text(TEXT), text("")),
    ("content null", text(TEXT), text(None)),
    ("text behind a stop string", text("<code>look()"), text("<code>look()</code>\nObservation: three files")),
    ("text before a long answer", text(TEXT), text(f"Assistant: {TEXT}")),
    ("a middle is left out", text(TEXT * 2 + OTHER), text(TEXT + OTHER[20:])),
    ("thinking is removed, and a letter mended", text("<think>hm, hm</think>Pariis"), text("Paris")),
    ("thinking without its beginning", text("long thoughts</think>Paris"), text("Paris.")),
    ("parts of a list", text(TEXT), text([{"type": "text", "text": TEXT[:40]}])),
    ("arguments as an object with a default", call("look", json.dumps(QUERY)), call("look", {**QUERY, "unit": "C"})),
    (
        "arguments with other spaces, and text dropped",
        call("look", '{"city":"Paris"}', "I look."),
        call("look", '{"city": "Paris"}'),
    ),
    ("a call that is no JSON, mended", call("look", '{"city": "Paris", "days": 3'), call("look", json.dumps(QUERY))),
]

OTHERS = [
    ("another text", text("sorry, {not json"), text('{"a": 1}')),
    ("another number", text("4"), text("5")),
    ("another word", text("yes"), text("no")),
    ("a word that begins alike", text("yes"), text("yesterday evening")),
    ("a letter that begins a sentence", text("A"), text("Answer: B")),
    ("the same said in other words", text(TEXT), text(OTHER)),
    ("an empty answer", text(""), text("Paris")),
    ("only thinking", text("<think>Paris</think>"), text("Paris")),
    ("signs", text("{{{"), text("Paris")),
    ("a call instead of text", text("I cannot look."), call("look", '{"city": "Paris"}')),
    ("a call of another tool", call("look", '{"city": "Paris"}'), call("search", '{"query": "weather"}')),
]


@pytest.mark.parametrize(("answer", "message"), [case[1:] for case in EDITS], ids=[case[0] for case in EDITS])
def test_an_edit_keeps_the_answer(answer: dict[str, Any], message: dict[str, Any]) -> None:
    assert is_edit(answer, message)


@pytest.mark.parametrize(("answer", "message"), [case[1:] for case in OTHERS], ids=[case[0] for case in OTHERS])
def test_another_answer_is_no_edit(answer: dict[str, Any], message: dict[str, Any]) -> None:
    assert not is_edit(answer, message)
