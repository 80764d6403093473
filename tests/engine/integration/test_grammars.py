"""Grammars on the real engine: a wrong one is the caller's error, a right one is obeyed, and no answer is unreadable."""

import json
from typing import Any

import pytest

from tests.live import Server
from tests.waiting import PATIENCE_SECONDS

QUESTION = [{"role": "user", "content": "Give me JSON."}]
CIRCLE = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
TUPLE = {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]}


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}


def ask(server: Server, **fields: Any) -> Any:
    body = {"model": "art/tiny", "messages": QUESTION, "max_tokens": 64, **fields}
    with server.client() as client:
        return client.post("/v1/chat/completions", json=body, timeout=PATIENCE_SECONDS)


BAD = [
    (
        {"structured_outputs": {"grammar": 'root ::= "a"\nroot ::= "b"'}},
        "structured_outputs.grammar",
    ),
    ({"structured_outputs": {"grammar": "root ::= nothing"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": CIRCLE}}, "structured_outputs.json"),
    ({"response_format": schema(CIRCLE)}, "response_format.json_schema"),
    ({"response_format": schema({"type": "strin"})}, "response_format.json_schema"),
]


@pytest.mark.parametrize(("fields", "path", "stream"), [*((*case, False) for case in BAD), (*BAD[-1], True)])
def test_a_grammar_that_cannot_be_compiled_is_the_caller_s_error(
    server: Server, fields: dict[str, Any], path: str, stream: bool
) -> None:
    response = ask(server, **fields, stream=stream)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == path, error
    assert ask(server, max_tokens=1).status_code == 200, "the engine answers the next request"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_bad_schema_is_the_caller_s_error_in_every_api(server: Server, api: str, stream: bool) -> None:
    body: dict[str, Any] = {"model": "art/tiny", "stream": stream}
    if api == "responses":
        wanted = {"type": "json_schema", "name": "s", "schema": CIRCLE}
        body |= {"input": "Give me JSON.", "max_output_tokens": 8, "text": {"format": wanted}}
        path = "text.format"
    else:
        wanted = {"type": "json_schema", "schema": CIRCLE}
        body |= {"messages": QUESTION, "max_tokens": 8, "output_config": {"format": wanted}}
        path = "output_config.format"
    with server.client() as client:
        response = client.post(f"/v1/{api}", json=body, timeout=PATIENCE_SECONDS)
    assert response.status_code == 400, response.text
    assert path in response.text


def test_a_schema_of_the_second_backend_is_obeyed_after_one_of_the_first(server: Server) -> None:
    assert ask(server, response_format={"type": "json_object"}, max_tokens=4).status_code == 200
    multiple = {"type": "integer", "multipleOf": 7, "minimum": 7, "maximum": 70}
    for wanted in (multiple, TUPLE):
        response = ask(server, response_format=schema(wanted), max_tokens=200, n=4)
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            if choice["finish_reason"] == "stop":
                value = json.loads(choice["message"]["content"])
                assert value % 7 == 0 if wanted is multiple else isinstance(value, list)


def test_no_answer_is_lost_in_blanks(server: Server) -> None:
    wanted = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    wanted["additionalProperties"] = False
    response = ask(server, response_format=schema(wanted), max_tokens=400, n=16, temperature=1.5)
    for choice in response.json()["choices"]:
        assert choice["finish_reason"] == "stop" and json.loads(choice["message"]["content"]) == {"a": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_character_in_arguments_is_sent_as_a_replacement(server: Server, stream: bool) -> None:
    """What the model wrote cannot be encoded: the agent could not send it back."""
    text = '<tool_call>\n{"name": "f", "arguments": {"x": "a\\ud83cb"}}\n</tool_call>'
    tools = [tool({"type": "object", "properties": {"x": {"type": "string"}}})]
    response = ask(server, tools=tools, structured_outputs={"choice": [text]}, max_tokens=200, stream=stream)
    assert response.status_code == 200, response.text
    if stream:
        arguments = ""
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:]).get("choices", ()):
                    for call in choice["delta"].get("tool_calls") or ():
                        arguments += call["function"].get("arguments") or ""
    else:
        (call,) = response.json()["choices"][0]["message"]["tool_calls"]
        arguments = call["function"]["arguments"]
    assert json.loads(arguments) == {"x": "a\ufffdb"}
    function = {"name": "f", "arguments": arguments}
    tool_call = {"id": "c1", "type": "function", "function": function}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [tool_call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    assert ask(server, messages=messages, tools=tools, max_tokens=2).status_code == 200
