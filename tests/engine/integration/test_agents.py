"""Agents that were not written for ART run in this process against the real server."""

from collections.abc import AsyncIterator

import anthropic
import httpx
import openai
import pytest

import art
from tests.live import PROJECT, Server
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.anyio

BODY = {"messages": [{"role": "user", "content": "respond with yes, no, maybe"}], "max_tokens": 8}


@pytest.fixture
async def backend(server: Server) -> AsyncIterator[art.Backend]:
    async with art.Backend(server.url) as backend:
        yield backend


async def make_model(backend: art.Backend, name: str) -> art.TrainableModel:
    model = art.TrainableModel(name=name, project=PROJECT, base_model="art/tiny")
    await model.register(backend)
    return model


async def test_url_key_and_header_name_the_same_session(server: Server, backend: art.Backend) -> None:
    model = await make_model(backend, "named")
    name = model.get_inference_name()
    async with art.rollout(model) as r:
        by_url = openai.AsyncOpenAI(base_url=r.base_url, api_key="any")
        by_key = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=r.api_key)
        questions = [f"respond with yes, no, maybe: {number}" for number in range(5)]
        *bodies, last = [{**BODY, "messages": [{"role": "user", "content": question}]} for question in questions]
        clients = (by_url, by_key, r.openai_client(), model.openai_client())
        for client, body in zip(clients, bodies, strict=True):
            await client.chat.completions.create(model=name, **body)
        by_both = anthropic.AsyncAnthropic(base_url=r.root_url, api_key=r.api_key)
        await by_both.messages.create(model=name, **last)
        trajectory = await r.trajectory(1.0)
    histories = [trajectory, *trajectory.additional_histories]
    assert len(histories) == 5
    for history, question in zip(histories, questions, strict=True):
        assert history.messages_and_choices[0] == {"role": "user", "content": question}
        assert isinstance(history.messages_and_choices[1], art.types.Choice)
    assert "unused_choices" not in trajectory.metrics
    for client in (by_url, by_key, by_both):
        await client.close()


async def test_a_captured_conversation_trains_on_exact_tokens(server: Server, backend: art.Backend) -> None:
    model = await make_model(backend, "captured")
    body = {**BODY, "model": model.get_inference_name()}

    async def run(reward: float) -> None:
        """Two turns by a plain HTTP client; the second one streams."""
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as client:
            first = (await client.post("/v1/chat/completions", json=body)).json()
            said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
            messages = [*body["messages"], said, {"role": "user", "content": "again"}]
            stream = {**body, "messages": messages, "stream": True}
            assert (await client.post("/v1/chat/completions", json=stream)).is_success
        art.auto_trajectory(required=True).reward = reward

    group = await art.trajectory_group(art.trajectory(run(float(n))) for n in range(4))
    assert [trajectory.reward for trajectory in group] == [0.0, 1.0, 2.0, 3.0]
    for trajectory in group:
        roles = [message["role"] for message in trajectory.messages()]
        assert roles == ["user", "assistant", "user", "assistant"]
        assert trajectory.additional_histories == []
    report = (await model.train([group], art.TrainConfig(learning_rate=1e-3))).report
    assert report.turns.keys() <= {"ids", "ledger"} and sum(report.turns.values()) == 8
    assert not report.dropped


async def test_two_models_of_one_rollout_are_captured_apart(backend: art.Backend) -> None:
    first, second = [await make_model(backend, name) for name in ("white", "black")]
    async with art.rollout(first) as r:
        said = "respond with yes, no, maybe"
        for model in (first, second, first):
            messages: art.types.Messages = [{"role": "user", "content": said}]
            completion = await model.openai_client().chat.completions.create(
                model=model.get_inference_name(), messages=messages, max_tokens=8
            )
            said = completion.choices[0].message.content or "nothing"
        white, black = await r.trajectory(1.0), await r.trajectory(0.0, model=second)
    assert len([white, *white.additional_histories]) == 2
    assert len([black, *black.additional_histories]) == 1
    assert black.messages_and_choices[0] == {
        "role": "user",
        "content": white.messages()[-1].get("content") or "nothing",
    }
