"""Scenarios for MCP servers, from a scripted model behind a real HTTP server."""

import json
from typing import Any

import pytest

import art
from art.mcp import (
    GeneratedScenario,
    GeneratedScenarioCollection,
    MCPTool,
    generate_scenarios,
)
from tests.quick.client.conftest import Answer, FakeServer, Request

pytestmark = pytest.mark.anyio
TOOL = MCPTool("search", "Search mail", {"type": "object", "properties": {}})


class Generator:
    """Answers with texts in turn, the last one again and again."""

    def __init__(self, server: FakeServer) -> None:
        self.texts: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.takes_schema = True
        self.url = f"{server.url}/v1"
        server.on("POST", "/v1/chat/completions", self.reply)

    def reply(self, request: Request) -> Answer:
        body = request.json() | {"key": request.headers["authorization"]}
        if "response_format" in body and not self.takes_schema:
            return Answer(400, {"error": {"message": "no response_format here"}})
        self.requests.append(body)
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        kind = {"id": "1", "object": "chat.completion", "created": 1}
        return Answer(body=kind | {"choices": [choice]})


@pytest.fixture
def generator(server: FakeServer) -> Generator:
    return Generator(server)


def answer(*tasks: str, difficulty: Any = 2) -> str:
    return json.dumps({"scenarios": [{"task": t, "difficulty": difficulty} for t in tasks]})


async def generate(generator: Generator, tools: Any = (TOOL,), **options: Any) -> Any:
    options = {"num_scenarios": 3, "show_preview": False} | options
    return await generate_scenarios(
        tools=tools,
        generator_model="m",
        generator_base_url=generator.url,
        **options,
    )


async def test_the_model_is_asked_until_there_are_enough_different_scenarios(
    generator: Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    generator.texts = [
        f"Here you are:\n```json\n{answer('a', 'b', 'a')}\n```",
        "I cannot do that",
        '{"scenarios": 3}',
        answer("x", difficulty=9),
        answer("b", "c", "d"),
    ]
    resource = {"uri": "mail://inbox", "name": "inbox", "mimeType": "text/plain"}
    scenarios = await generate(
        generator,
        resources=[resource],
        show_preview=True,
        custom_instructions="Speak of bees.",
        generator_api_key="k",
    )
    assert [scenario.task for scenario in scenarios] == ["a", "b", "c"]
    first, *_, last = generator.requests
    text = first["messages"][0]["content"]
    assert "Invent 3 tasks" in text and "Speak of bees." in text and "mail://inbox" in text
    assert first["key"] == "Bearer k" and first["response_format"]["type"] == "json_schema"
    assert "Invent 1 tasks" in last["messages"][0]["content"]
    assert "Do not repeat these:\n  a\n  b" in last["messages"][0]["content"]
    assert "difficulty 2/5:   3  ███" in capsys.readouterr().out


async def test_an_endpoint_without_schemas_and_mcp_s_own_tools(generator: Generator) -> None:
    mcp_types = pytest.importorskip("mcp.types", reason="the package mcp is not installed")
    tool = mcp_types.Tool(name="get", inputSchema={"type": "object", "title": "Wanted"})
    generator.takes_schema, generator.texts = False, [answer("a")]
    assert len(await generate(generator, [tool], num_scenarios=1)) == 1
    assert '"title": "Wanted"' in generator.requests[0]["messages"][0]["content"]


async def test_what_cannot_succeed_ends_with_the_reason(generator: Generator) -> None:
    generator.texts = [answer("a"), "no"]
    with pytest.raises(art.ArtError, match="'m'"):
        await generate(generator)
    with pytest.raises(ValueError, match="tool"):
        await generate(generator, ())
    with pytest.raises(TypeError, match="MCPTool"):
        await generate(generator, ["search"])
    with pytest.raises(ValueError, match="num_scenarios"):
        await generate(generator, num_scenarios=0)
    with pytest.raises(art.ArtError, match=r"127\.0\.0\.1"):
        await generate_scenarios([TOOL], generator_base_url="http://127.0.0.1:9/v1")


def test_a_collection_is_a_list_of_scenarios() -> None:
    scenarios = GeneratedScenarioCollection([GeneratedScenario(f"t{d}", d) for d in (1, 3, 5)])
    assert [scenario.task for scenario in scenarios.filter_by_difficulty(2, 5)] == ["t3", "t5"]
    train, val = scenarios.split(2)
    assert (len(train), val[0].task, scenarios[-1].difficulty) == (2, "t5", 5)
    assert GeneratedScenarioCollection.from_json(scenarios.to_json()).to_dicts() == (scenarios.to_dicts())
    assert sorted(s.task for s in scenarios.shuffle()) == ["t1", "t3", "t5"]
    assert scenarios.get_summary() == {
        "total_scenarios": 3,
        "difficulty_distribution": {1: 1, 3: 1, 5: 1},
        "avg_difficulty": 3.0,
        "avg_task_length": 2.0,
    }
    with pytest.raises(ValueError, match="train_size"):
        scenarios.split(4)
    with pytest.raises(ValueError, match="difficulty"):
        GeneratedScenario("t", 6)
    with pytest.raises(ValueError, match="scenarios"):
        GeneratedScenarioCollection.from_json('{"tasks": []}')
    assert GeneratedScenario("x" * 200, 1).preview(10) == "x" * 10 + "…"
