"""What a fake and the real thing both do. tests/quick runs these with the fakes, tests/engine with a real server and vLLM."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

import art
from art_server.engine.engine import AdapterRefused
from art_server.engine.fleet import Fleet
from art_server.errors import Unavailable
from art_server.shared.engine_messages import new_request_id
from tests.waiting import PATIENCE_SECONDS


async def check_server(url: str) -> None:
    """A program's round: a model at step 0, a request, a group, a step, and a step that comes too late."""
    async with art.Backend(url) as backend:
        model = art.TrainableModel(name="contract", project="tests", base_model="art/tiny")
        await model.register(backend)
        assert await model.get_step() == 0
        messages: Any = [{"role": "user", "content": "respond with yes, no, maybe"}]
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, n=1, max_tokens=8
        )
        (choice,) = completion.choices
        assert completion.object == "chat.completion" and choice.index == 0
        assert choice.message.role == "assistant" and choice.message.content
        assert not (choice.model_extra or {}).get("token_ids"), "they stay hidden unless asked for"
        asked = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(),
            messages=messages,
            max_tokens=8,
            extra_body={"return_token_ids": True},
        )
        assert (asked.choices[0].model_extra or {})["token_ids"]
        assert (asked.model_extra or {})["prompt_token_ids"]
        group = art.TrajectoryGroup(
            art.Trajectory(messages_and_choices=[*messages, choice], reward=reward) for reward in (0.0, 1.0)
        )
        result = await model.train([group])
        assert result.step == 1 == await model.get_step()
        assert result.metrics["train/reward"] >= 0
        job = await model.submit([group], expected_step=1)
        assert (await job).step == 2 == await model.get_step()
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as http:
        assert (await http.get("/health")).json()["status"]
        info = (await http.get("/api/models/tests/contract")).json()
        assert (info["name"], info["project"], info["step"]) == ("contract", "tests", 2)
        assert info["inference_name"] == "tests/contract" and info["base_model"] == "art/tiny"
        late = await http.post(
            "/api/models/tests/contract/train",
            json={"groups": [group.model_dump(mode="json")], "expected_step": 0},
        )
        assert (late.status_code, late.json()["error"]["code"]) == (409, "step_moved")


async def check_vllm(http: aiohttp.ClientSession, adapter: Path, no_adapter: Path) -> None:
    """The routes by which the engine steers vLLM. `adapter` can be loaded."""

    async def post(path: str, **body: Any) -> tuple[int, Any]:
        async with http.post(path, json=body) as response:
            is_json = response.content_type == "application/json"
            return response.status, await response.json() if is_json else None

    async with http.get("/health") as response:
        assert response.status == 200
    async with http.get("/v1/models") as response:
        assert (await response.json())["data"][0]["max_model_len"] > 0

    status, body = await post("/v1/load_lora_adapter", lora_name="c@0", lora_path=str(no_adapter))
    assert (status, body["error"]["code"]) == (404, 404)
    status, _ = await post("/v1/load_lora_adapter", lora_name="c@1", lora_path=str(adapter))
    assert status == 200
    status, body = await post("/v1/load_lora_adapter", lora_name="c@1", lora_path=str(adapter))
    assert (status, body["error"]["type"]) == (400, "InvalidUserInput")
    assert "already been loaded" in body["error"]["message"], "by which the engine knows it"

    assert (await post("/pause?mode=keep&clear_cache=false"))[0] == 200
    assert (await post("/resume"))[0] == 200
    status, body = await post("/v1/completions", model="c@1", prompt=[1], max_tokens=1)
    assert (status, body["model"]) == (200, "c@1")
    await check_chat(http)
    async with http.get("/metrics") as response:
        assert "vllm:num_requests_running" in await response.text()

    assert (await post("/v1/unload_lora_adapter", lora_name="c@1"))[0] == 200
    status, body = await post("/v1/unload_lora_adapter", lora_name="c@1")
    assert (status, body["error"]["type"]) == (404, "NotFoundError")


async def check_chat(http: aiohttp.ClientSession) -> None:
    """What the server reads of an answer, whole and streamed."""
    headers = {"x-request-id": new_request_id(is_first_turn=True)}
    body: dict[str, Any] = {"model": "c@1", "messages": [{"role": "user", "content": "q"}], "max_tokens": 2}
    body |= {"logprobs": True}
    async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200
        answer = await response.json()
    (choice,) = answer["choices"]
    assert answer["id"] == f"chatcmpl-{headers['x-request-id']}"
    assert (answer["object"], answer["model"]) == ("chat.completion", "c@1")
    assert (choice["index"], choice["message"]["role"]) == (0, "assistant") and choice["finish_reason"]
    assert {"token", "logprob"} <= choice["logprobs"]["content"][0].keys()
    async with http.post("/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        *events, end, rest = (await response.text()).split("\n\n")
    assert (end, rest) == ("data: [DONE]", "") and all(event.startswith("data: {") for event in events)
    chunk = json.loads(events[0].removeprefix("data: "))
    assert chunk["object"] == "chat.completion.chunk" and chunk["choices"][0]["delta"]["role"] == "assistant"


async def check_engine(engine: Fleet, adapter: Path, refused: str, seconds: float) -> None:
    """What a job runner and the proxy use of a fleet of one engine that is ready, and does not take the adapter `refused`."""
    await engine.wait_ready(seconds)
    (replica,) = engine.replicas
    assert engine.state == "ready" and engine.start_waited_for is None and await replica.is_alive()
    assert engine.load_waited_for() is None
    assert engine.base is not None and engine.max_seq_length
    await engine.load_adapter("p/a@0", adapter, seconds)
    await engine.load_adapter("p/a@0", adapter, seconds)
    assert engine.loaded_adapters() == ["p/a@0"]
    with pytest.raises(AdapterRefused):
        await engine.load_adapter(refused, adapter.parent / "nothing", seconds)
    assert engine.loaded_adapters() == ["p/a@0"]
    await engine.pause()
    await engine.resume()
    engine.unload_adapter("p/a@0")
    engine.unload_adapter("p/a@0")
    assert engine.loaded_adapters() == []
    base = engine.base
    await engine.load_adapter("p/a@0", adapter, seconds)
    await engine.stop()
    assert (engine.state, engine.base, engine.loaded_adapters()) == ("none", None, [])
    engine.start(base, {})
    await engine.wait_ready(seconds)
    replica.state = "failed"
    with pytest.raises(Unavailable) as failed:
        await engine.wait_ready(seconds)
    assert failed.value.code == "engine_failed"
