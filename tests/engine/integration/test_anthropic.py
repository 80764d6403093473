"""Anthropic's API with the real engine: thinking, the count of a prompt's tokens, and refusals."""

from typing import Any

import anthropic
import httpx
import pytest

from tests.engine.integration.answers import TOKENIZER, sse_data
from tests.live import Server, register

ASKED = {"role": "user", "content": "respond with yes, no, maybe"}
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
SYSTEM = [{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}]


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    return register(server, "anthropic")["inference_name"]


def create(client: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "max_tokens": 8, "messages": [ASKED], **fields}
    response = client.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def kinds(answer: dict[str, Any]) -> list[str]:
    return [block["type"] for block in answer["content"]]


def test_an_effort_alone_does_not_switch_thinking_on(server: Server, model: str) -> None:
    effort = {"output_config": {"effort": "high"}}
    with server.client() as client:
        assert kinds(create(client, model, **effort)) == ["text"]
        assert kinds(create(client, model, **effort, thinking={"type": "disabled"})) == ["text"]
        assert kinds(create(client, model, **effort, thinking={"type": "adaptive"})) == ["thinking"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "You are brief.", "tools": [TOOL]},
        {"system": SYSTEM, "tools": [TOOL], "tool_choice": {"type": "none"}},
        {"output_config": {"effort": "high"}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
        {"messages": [ASKED, {"role": "assistant", "content": "no"}, {"role": "user", "content": "why?"}]},
    ],
)
def test_the_count_is_the_number_of_the_prompt_s_tokens(server: Server, model: str, fields: dict[str, Any]) -> None:
    with server.client() as client:
        used = create(client, model, **fields)["usage"]["input_tokens"]
        body = {"model": model, "messages": [ASKED], **fields}
        counted = client.post("/s/counting/v1/messages/count_tokens", json=body).json()
    assert counted["input_tokens"] == used


def test_a_continued_conversation_is_counted_with_the_tokens_that_were_sampled(server: Server, model: str) -> None:
    """An answer in a spelling that the tokenizer would not choose has more tokens than its rendering."""
    spelling = [TOKENIZER.token_to_id(letter) for letter in "yes"]
    body = {"model": model, "messages": [ASKED], "allowed_token_ids": spelling, "max_tokens": 6, "ignore_eos": True}
    text = ""
    with server.client() as client:
        for seed in range(32):  # in some answers no letters make a longer token
            answer = client.post("/v1/chat/completions", json=body | {"seed": seed}).json()
            text = answer["choices"][0]["message"]["content"]
            if len(TOKENIZER.encode(text, add_special_tokens=False).ids) < 6:
                break
        more = [ASKED, {"role": "assistant", "content": text}, {"role": "user", "content": "why?"}]
        counted = client.post("/v1/messages/count_tokens", json={"model": model, "messages": more}).json()
        used = create(client, model, messages=more)["usage"]["input_tokens"]
    assert len(TOKENIZER.encode(text, add_special_tokens=False).ids) < 6, "the rendering has fewer tokens"
    assert counted["input_tokens"] == used


def test_the_thinking_that_an_agent_left_out_is_counted(server: Server, model: str) -> None:
    thinks: dict[str, Any] = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}, "max_tokens": 24}
    with server.client() as client:
        answer = create(client, model, **thinks)
        more = [ASKED, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "why?"}]
        body = {"model": model, "messages": more, **thinks}
        counted = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
        assert counted == create(client, model, messages=more, **thinks)["usage"]["input_tokens"]


def test_a_count_leaves_no_turn_in_a_session(server: Server, model: str) -> None:
    agent = anthropic.Anthropic(base_url=f"{server.url}/s/counted", api_key="default")
    with server.client() as client, agent:
        assert agent.messages.count_tokens(model=model, messages=[ASKED]).input_tokens > 0  # pyright: ignore[reportArgumentType]
        project, name = model.split("/")
        session = client.get(f"/api/models/{project}/{name}/sessions/counted").json()
    assert (session["num_choices"], session["unused"], session["histories"]) == (0, {}, [])


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_read_by_anthropic_s_client(server: Server, model: str, stream: bool) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="default") as agent:
        with pytest.raises(anthropic.BadRequestError) as caught:
            agent.messages.create(model=model, messages=[ASKED], max_tokens=8, stream=stream, extra_body={"top_p": 7.0})  # pyright: ignore
        assert caught.value.type == "invalid_request_error" and "top_p" in str(caught.value.api_message)
        with pytest.raises(anthropic.NotFoundError) as unknown:
            agent.messages.create(model="p/none", messages=[ASKED], max_tokens=8, stream=stream)  # pyright: ignore
        assert unknown.value.type == "not_found_error"


def test_a_stream_is_counted_too(server: Server, model: str) -> None:
    with server.client() as client:
        body = {"model": model, "messages": [ASKED], "max_tokens": 8, "stream": True}
        events = sse_data(client.post("/v1/messages", json=body).text)
        counted = client.post("/v1/messages/count_tokens", json=body).json()
    assert counted["input_tokens"] == events[-2]["usage"]["input_tokens"]


def test_a_search_of_the_web_beside_other_tools_is_not_in_the_prompt(server: Server, model: str) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    with server.client() as client:
        without = create(client, model, tools=[TOOL])["usage"]["input_tokens"]
        assert create(client, model, tools=[TOOL, search])["usage"]["input_tokens"] == without
        alone = client.post(
            "/v1/messages", json={"model": model, "max_tokens": 8, "messages": [ASKED], "tools": [search]}
        )
    assert alone.status_code == 400 and "--disallowedTools" in alone.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_kinds_of_tools_of_codex_are_taken(server: Server, model: str, stream: bool) -> None:
    function = {"type": "function", "name": "shell", "parameters": TOOL["input_schema"], "strict": False}
    others = {"type": "namespace", "name": "agents", "description": "Others.", "tools": [{**function, "name": "spawn"}]}
    search = {"type": "web_search", "external_web_access": False}
    message = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]}
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASKED["content"]}]}
    body = {
        "model": model,
        "instructions": "You are an agent.",
        "input": [message, asked],
        "tools": [function, others, search],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "store": False,
        "stream": stream,
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 8,
    }
    with server.client() as client:
        answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    last = sse_data(answer.text)[-1]["response"] if stream else answer.json()
    assert last["status"] == "incomplete" or last["output"]


LIMITS = {"messages": "max_tokens", "chat/completions": "max_completion_tokens", "responses": "max_output_tokens"}


@pytest.mark.parametrize("api", LIMITS)
def test_a_limit_above_the_context_is_refused_with_both_numbers_and_settings(
    server: Server, model: str, api: str
) -> None:
    body = {"model": model, "messages": [ASKED], "input": ASKED["content"], LIMITS[api]: 32000}
    with server.client() as client:
        (context,) = {card["max_model_len"] for card in client.get("/v1/models").json()["data"]}
        refused = client.post(f"/v1/{api}", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "max_tokens_too_large", LIMITS[api])
    assert error["message"].startswith(f"{LIMITS[api]}: 32000 > {context}, the tokens of this server's context")
    assert "CLAUDE_CODE_MAX_OUTPUT_TOKENS" in error["message"]


@pytest.mark.parametrize("count", [False, True])
@pytest.mark.parametrize("length", [3000, 30000])
def test_a_prompt_above_the_context_is_refused_in_anthropic_s_words(
    server: Server, model: str, length: int, count: bool
) -> None:
    """Claude Code reads them, and compacts its conversation."""
    with (
        anthropic.Anthropic(base_url=server.url, api_key="default") as agent,
        pytest.raises(anthropic.BadRequestError) as caught,
    ):
        messages: Any = [{"role": "user", "content": "x y " * length}]
        if count:
            agent.messages.count_tokens(model=model, messages=messages)
        else:
            agent.messages.create(model=model, max_tokens=8, messages=messages)
    assert str(caught.value.api_message).startswith("prompt is too long: ") and "> " in str(caught.value.api_message)


@pytest.mark.parametrize("api", ["chat/completions", "responses"])
def test_a_prompt_above_the_context_has_openai_s_words_and_code(server: Server, model: str, api: str) -> None:
    text = "x y " * 3000
    body = {"model": model, "messages": [{"role": "user", "content": text}], "input": text}
    with server.client() as client:
        error = client.post(f"/v1/{api}", json=body).json()["error"]
    assert error["code"] == "context_length_exceeded" and "maximum context length is" in error["message"]
