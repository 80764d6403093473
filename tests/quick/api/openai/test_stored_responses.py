"""Requests of the Responses API that name an earlier answer in place of its conversation."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import art
from art_server.ledger.ledger import Ledger, Retention
from art_server.settings import ApiKey
from tests.fakes.vllm import TEXT
from tests.quick.server.served import Served, serving

pytestmark = pytest.mark.anyio

QUESTION = "What is 2 plus 3?"
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "5"}


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as served:
        await register(served, "a", "b")
        yield served


async def register(served: Served, *names: str, project: str = "p", key: str | None = None) -> None:
    async with art.Backend(served.url, key) as backend:
        for name in names:
            await art.TrainableModel(name=name, project=project, base_model="art/tiny").register(backend)


async def post(served: Served, body: dict[str, Any], key: str = "none", path: str = "/v1") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=served.url, headers=headers) as http:
        return await http.post(f"{path}/responses", json={"model": "p/a", **body})


async def respond(served: Served, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    response = await post(served, body, **options)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    return events[-1]["response"]


def refusal_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


def items_of(served: Served) -> list[Any]:
    """The items of the last request that vLLM got."""
    return served.engine.vllm.responses[-1]["input"]


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answered(number: int) -> list[dict[str, Any]]:
    """The items of the engine's answer, without its fields that are null."""
    content = [{"type": "output_text", "text": TEXT, "annotations": []}]
    call = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": "add"}
    return [
        {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": content},
        {**call, "arguments": '{"a": 1}', "status": "completed"},
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_named_response_is_continued(served: Served, stream: bool) -> None:
    """Whole and streamed, over three turns. Instructions are those of the request."""
    options = {"stream": stream, "temperature": 1.0}
    first = await respond(served, {"input": QUESTION, "instructions": "Be brief.", **options})
    assert first["previous_response_id"] is None
    second = await respond(served, {"input": [RESULT], "previous_response_id": first["id"], **options})
    assert items_of(served) == [asked(QUESTION), *answered(1), RESULT]
    assert second["previous_response_id"] == first["id"]
    await respond(served, {"input": "and then?", "previous_response_id": second["id"], **options})
    assert items_of(served) == [asked(QUESTION), *answered(1), RESULT, *answered(2), asked("and then?")]
    bodies = served.engine.vllm.responses
    assert all("previous_response_id" not in body for body in bodies)
    assert [body.get("instructions") for body in bodies] == ["Be brief.", None, None]


async def test_one_response_has_several_continuations(served: Served) -> None:
    first = await respond(served, {"input": [asked(QUESTION)]})
    for text in ("one", "two"):
        await respond(served, {"input": text, "previous_response_id": first["id"]})
        assert items_of(served) == [asked(QUESTION), *answered(1), asked(text)]
    await respond(served, {"input": [], "previous_response_id": first["id"]})
    assert items_of(served) == [asked(QUESTION), *answered(1)]
    await respond(served, {"input": QUESTION, "previous_response_id": None})
    assert items_of(served) == QUESTION


async def test_items_are_named_alone(served: Served) -> None:
    await respond(served, {"input": QUESTION})
    references = [{"type": "item_reference", "id": name} for name in ("msg_1", "fc_1")]
    await respond(served, {"input": [asked(QUESTION), *references, RESULT]})
    assert items_of(served) == [asked(QUESTION), *answered(1), RESULT]
    unknown = await post(served, {"input": [asked(QUESTION), {"type": "item_reference", "id": "msg_9"}]})
    assert refusal_of(unknown) == (404, "unknown_item", "input[1]")


async def test_responses_outlive_the_server(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await register(served, "a")
        first = await respond(served, {"input": QUESTION, "stream": True})
    async with serving(tmp_path) as served:
        await respond(served, {"input": [RESULT], "previous_response_id": first["id"]})
        assert items_of(served) == [asked(QUESTION), *answered(1), RESULT]


UNKNOWN = (404, "unknown_response", "previous_response_id")


async def test_what_is_not_stored_is_unknown(served: Served) -> None:
    private = await respond(served, {"input": QUESTION, "store": False})
    for name in (private["id"], "resp_x", "", "x' OR 1"):
        refused = await post(served, {"input": [RESULT], "previous_response_id": name})
        assert refusal_of(refused) == UNKNOWN
        assert "store: false" in refused.json()["error"]["message"]
    refused = await post(served, {"input": [{"type": "item_reference", "id": "msg_1"}]})
    assert refusal_of(refused) == (404, "unknown_item", "input[0]")
    wrong = await post(served, {"input": [RESULT], "previous_response_id": 3})
    assert refusal_of(wrong) == (400, "invalid_body", "previous_response_id")


@pytest.mark.parametrize("field", ["background", "conversation"])
async def test_what_would_need_a_server_that_waits_is_refused(served: Served, field: str) -> None:
    refused = await post(served, {"input": QUESTION, field: True})
    assert refusal_of(refused) == (400, "unknown_option", field)
    await respond(served, {"input": QUESTION, field: None})


@pytest.mark.parametrize("kind", ["file_search", "code_interpreter", "mcp"])
async def test_a_tool_that_nothing_runs_is_refused(served: Served, kind: str) -> None:
    own = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    refused = await post(served, {"input": QUESTION, "tools": [own, {"type": kind}]})
    assert refusal_of(refused) == (400, "unknown_option", "tools[1].type")
    await respond(
        served, {"input": QUESTION, "tools": [own, {"type": "web_search"}, {"type": "custom", "name": "note"}]}
    )
    assert [tool["type"] for tool in served.engine.vllm.responses[-1]["tools"]] == ["function", "custom"]


async def test_a_response_is_its_models_and_its_callers(tmp_path: Path) -> None:
    keys = [ApiKey(key="p-key", projects=frozenset({"p"})), ApiKey(key="p-two", projects=frozenset({"p"}))]
    keys.append(ApiKey(key="q-key", projects=frozenset({"q"})))
    async with serving(tmp_path, api_keys=tuple(keys)) as served:
        await register(served, "a", "b", key="p-key")
        await register(served, "a", project="q", key="q-key")
        trained = await respond(served, {"input": QUESTION}, key="p-key")
        base = await respond(served, {"input": QUESTION, "model": "base"}, key="p-key")
        for model, key, first, is_known in [
            ("p/a", "p-key", trained, True),
            ("p/a", "p-two", trained, True),  # the keys of a project share its models
            ("p/b", "p-key", trained, False),
            ("base", "p-key", trained, False),
            ("q/a", "q-key", trained, False),
            ("base", "p-key", base, True),
            ("base", "p-two", base, False),
            ("base", "q-key", base, False),
            ("p/a", "p-key", base, False),
        ]:
            body = {"model": model, "input": [RESULT], "previous_response_id": first["id"]}
            response = await post(served, body, key=key)
            assert response.status_code == (200 if is_known else 404), (model, key, response.text)
            item = {"type": "item_reference", "id": first["output"][0]["id"]}
            response = await post(served, {"model": model, "input": [item]}, key=key)
            assert response.status_code == (200 if is_known else 404), (model, key, response.text)


async def test_a_session_has_the_whole_conversation(served: Served) -> None:
    async with art.Backend(served.url) as backend:
        model = art.TrainableModel(name="a", project="p", base_model="art/tiny")
        await model.register(backend)
        async with art.rollout(model) as rollout:
            path = rollout.base_url.removeprefix(served.url)
            first = await respond(served, {"input": QUESTION}, path=path)
            await respond(served, {"input": [RESULT], "previous_response_id": first["id"]}, path=path)
            trajectory = await rollout.trajectory()
    (history,) = [trajectory, *trajectory.additional_histories]
    roles = [message["role"] for message in history.messages()]
    assert roles == ["user", "assistant", "tool", "assistant"]


async def test_responses_are_deleted_with_their_records(served: Served, tmp_path: Path) -> None:
    first = await respond(served, {"input": QUESTION})
    second = await respond(served, {"input": [RESULT], "previous_response_id": first["id"]})
    with contextlib.closing(Ledger(tmp_path / ".server" / "ledger.sqlite", Retention(max_bytes=1))) as ledger:
        model = served.server.registry.get("p", "a").number
        assert ledger.find_response("p", model, second["id"]) == [
            asked(QUESTION), *answered(1), RESULT, *answered(2)
        ]  # fmt: skip
        assert ledger.prune() == 2
        rows = "SELECT (SELECT COUNT(*) FROM responses) + (SELECT COUNT(*) FROM response_items)"
        assert ledger._storage.db.execute(rows).fetchone()[0] == 0
        assert ledger._storage.db.execute("SELECT COUNT(*) FROM conversations").fetchone()[0] == 0
    refused = await post(served, {"input": [RESULT], "previous_response_id": second["id"]})
    assert refusal_of(refused) == UNKNOWN
