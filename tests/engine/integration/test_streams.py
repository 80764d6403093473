"""Streams on real vLLM: the same message as the whole answer, the same reason, the same next prompt."""

import json
from typing import Any

import pytest

from tests.engine.integration.answers import WEATHER_TOOL, session_records, sse_data
from tests.live import Server, register

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SWAPPED = '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>'
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    return register(server, "streams")["inference_name"]


def message_of(client: Any, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    """What a chat answer says, without ids."""
    response = client.post("/v1/chat/completions", json=body | {"stream": stream})
    assert response.status_code == 200, response.text
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    choices = (
        [choice for chunk in sse_data(response.text) for choice in chunk["choices"]]
        if stream
        else response.json()["choices"]
    )
    for choice in choices:
        part = choice.get("delta") or choice.get("message") or {}
        said["content"] += part.get("content") or ""
        said["reasoning"] += part.get("reasoning") or ""
        for call in part.get("tool_calls") or ():
            said["calls"].append((call["function"]["name"], call["function"]["arguments"]))
        if choice.get("finish_reason"):
            said |= {key: choice.get(key) for key in ("finish_reason", "stop_reason")}
    return said


@pytest.mark.parametrize(
    ("text", "more", "reason", "calls"),
    [
        (CALL, {}, "tool_calls", 1),
        (f"I look.\n{SWAPPED}\n{CALL}", {}, "tool_calls", 2),
        (f"I look.\n{SWAPPED}\n{CALL}", {"parallel_tool_calls": False}, "tool_calls", 1),
        (CALL, {"max_tokens": 9}, "length", 0),
        (CALL, {"stop": ['"Pa']}, "stop", 0),
        (CALL, {"stop": ["</tool_call>"]}, "tool_calls", 1),
        ('<tool_call>{"name": "get_weather", "arguments": {"city": </tool_call>', {}, "stop", 0),
        (CALL, {"tool_choice": "none"}, "stop", 0),
        ("a < b, <tool\n\n", {}, "stop", 0),
    ],
)
def test_a_chat_stream_says_what_the_whole_answer_says(
    server: Server, model: str, text: str, more: dict[str, Any], reason: str, calls: int
) -> None:
    body = {"model": model, "messages": [QUESTION], "tools": [WEATHER_TOOL], "max_tokens": 256}
    body |= {"structured_outputs": {"choice": [text]}, "chat_template_kwargs": {}, **more}
    with server.client() as client:
        whole, streamed = (message_of(client, body, stream) for stream in (False, True))
    assert streamed == whole
    assert (whole["finish_reason"], len(whole["calls"])) == (reason, calls)
    if not calls:
        assert text.startswith(whole["content"].rstrip()) and whole["content"]


@pytest.mark.parametrize("max_tokens", [3, 48], ids=["cut", "whole"])
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_the_next_prompt_after_a_stream_is_that_after_a_whole_answer(
    server: Server, model: str, api: str, max_tokens: int
) -> None:
    function = WEATHER_TOOL["function"]
    tool: dict[str, Any] = {
        "chat": WEATHER_TOOL,
        "responses": {"type": "function", **function},
        "messages": {"name": function["name"], "input_schema": function["parameters"]},
    }[api]
    path = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}[api]
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    field = "input" if api == "responses" else "messages"
    body = {"model": model, "tools": [tool], "temperature": 0, limit: max_tokens}
    prompts = []
    for stream in (False, True):
        session = f"next-{api}-{max_tokens}-{stream}"
        with server.client() as client:
            first = client.post(f"/s/{session}/v1/{path}", json=body | {field: [QUESTION], "stream": stream})
            said = said_again(api, sse_data(first.text) if stream else first.json())
            more = [QUESTION, *said, QUESTION]
            second = client.post(f"/s/{session}/v1/{path}", json=body | {field: more})
        assert (first.status_code, second.status_code) == (200, 200), second.text
        records = session_records(server, session, "streams")
        prompts.append([record.prompt_token_ids for record in records])
        assert len(records[0].token_ids) <= max_tokens
    assert prompts[0] == prompts[1] and len(prompts[0]) == 2


def said_again(api: str, answer: Any) -> list[dict[str, Any]]:
    """An answer's message, as an agent sends it back with results of its calls. A list is a stream's events."""
    whole: Any = answer
    events: list[Any] = answer if isinstance(answer, list) else []
    if api == "responses":
        items = (events[-1]["response"] if events else whole)["output"]
        call_ids = [i["call_id"] for i in items if i["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call, "output": "sunny"} for call in call_ids]
        return [*items, *results]
    if api == "messages":
        blocks = streamed_blocks(events) if events else whole["content"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        said = [{"role": "assistant", "content": blocks}]
        return [*said, {"role": "user", "content": results}] if results else said
    message: dict[str, Any] = {"role": "assistant", "content": "" if events else None}
    parts = (
        [choice["delta"] for event in events for choice in event["choices"]]
        if events
        else [whole["choices"][0]["message"]]
    )
    for part in parts:
        for key in ("content", "reasoning"):
            if part.get(key):
                message[key] = (message.get(key) or "") + part[key]
        for call in part.get("tool_calls") or ():
            call = {key: value for key, value in call.items() if key != "index"}
            message.setdefault("tool_calls", []).append(call)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in message.get("tool_calls", ())
    ]
    return [message, *results]


def streamed_blocks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream of the Messages API."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        for key, value in event.get("delta", {}).items():
            if key in ("text", "thinking", "signature"):
                blocks[-1][key] = blocks[-1].get(key, "") + value
            elif key == "partial_json":
                blocks[-1]["input"] = json.loads(value)  # calls come complete
    return blocks or [{"type": "text", "text": ""}]
