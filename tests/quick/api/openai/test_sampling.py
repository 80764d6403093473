"""Sampling parameters behind a session's name win over those of the request, whichever way the session is named."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import art
from art_protocol import sampling
from art_protocol.sampling import Sampling
from tests.quick.server.served import serving

pytestmark = pytest.mark.anyio

NAME = "a;temperature=0.25;top_p=0.5;max_tokens=7"
SET = {"temperature": 0.25, "top_p": 0.5, "max_tokens": 7}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}], "temperature": 1.0, "max_completion_tokens": 99}
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "url": (f"/s/{NAME}/v1/chat/completions", {}),
    "key": ("/v1/chat/completions", {"authorization": f"Bearer default::{NAME}"}),
    "header": ("/v1/chat/completions", {"x-art-session": NAME}),
}


@pytest.mark.parametrize("way", WAYS)
async def test_the_parameters_of_a_session_win(tmp_path: Path, way: str) -> None:
    path, headers = WAYS[way]
    async with serving(tmp_path) as served, art.Backend(served.url) as backend:
        model = art.TrainableModel(name="m", project="p", base_model="art/tiny")
        await model.register(backend)
        async with httpx.AsyncClient(base_url=served.url, headers=headers) as http:
            answered = await http.post(path, json=BODY | {"model": "p/m"})
            assert answered.status_code == 200, answered.text
            body = served.engine.vllm.chats[-1]
            assert {name: body[name] for name in SET} == SET and "max_completion_tokens" not in body
            other = [{"role": "user", "content": "another question"}]
            await http.post(path, json=BODY | {"model": "base", "messages": other})
            assert served.engine.vllm.chats[-1]["temperature"] == 1.0, "another model of the session keeps its own"
        trajectory = await art.rollout(model, "a").trajectory()
        assert len(trajectory.messages()) == 2, "the session's name is the one without parameters"


async def test_parameters_of_the_base_model_are_those_of_its_evaluation(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url) as http:
        path = "/s/a;temperature=0.25;base=1/v1/chat/completions"
        assert (await http.post(path, json=BODY | {"model": "base"})).status_code == 200
        assert served.engine.vllm.chats[-1]["temperature"] == 0.25


async def test_requests_of_a_session_with_a_seed_have_the_seeds_that_it_begins(tmp_path: Path) -> None:
    async def seeds(http: httpx.AsyncClient, session: str, *questions: str, **fields: Any) -> list[int]:
        for question in questions:
            body = BODY | {"model": "p/m", "messages": [{"role": "user", "content": question}], **fields}
            assert (await http.post(f"/s/{session}/v1/chat/completions", json=body)).status_code == 200
        return [body["seed"] for body in served.engine.vllm.chats[-len(questions) :]]

    async with serving(tmp_path) as served, art.Backend(served.url) as backend:
        model = art.TrainableModel(name="m", project="p", base_model="art/tiny")
        await model.register(backend)
        async with httpx.AsyncClient(base_url=served.url) as http:
            first = await seeds(http, "a;seed=5", "q", "q", "r")
            assert len(set(first)) == 3, "also equal requests have different seeds"
            assert await seeds(http, "b;seed=5", "q", "q", "r") == first
            assert not set(await seeds(http, "c;seed=6", "q", "q", "r")) & set(first)
            assert await seeds(http, "d;seed=5", "q", seed=7) == [7]


async def test_an_agent_with_its_own_client_is_seeded_in_an_evaluation(tmp_path: Path) -> None:
    async def rollout(model: art.TrainableModel, question: str) -> art.Trajectory:
        async with art.rollout(model) as r, openai.AsyncOpenAI(base_url=r.base_url, api_key=r.api_key) as client:
            for _ in range(2):
                await client.chat.completions.create(
                    model=r.model.get_inference_name(), messages=[{"role": "user", "content": question}]
                )
            return await r.trajectory()

    async with serving(tmp_path) as served, art.Backend(served.url) as backend:
        model = art.TrainableModel(name="m", project="p", base_model="art/tiny")
        await model.register(backend)
        for _ in range(2):
            await art.evaluate(model, rollout, ["q", "r"], reps=2, seed=1, log=False, max_concurrent_rollouts=1)
        seeds = [body["seed"] for body in served.engine.vllm.chats]
    assert len(set(seeds[:8])) == 8 and seeds[8:] == seeds[:8]


async def test_each_api_has_its_own_name_of_the_limit(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, art.Backend(served.url) as backend:
        model = art.TrainableModel(name="m", project="p", base_model="art/tiny")
        await model.register(backend)
        async with httpx.AsyncClient(base_url=served.url) as http:
            await http.post(f"/s/{NAME}/v1/responses", json={"model": "p/m", "input": "q"})
        assert served.engine.vllm.responses[-1]["max_output_tokens"] == 7


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a;top_k=3", "sampling has no 'top_k': known are temperature, top_p, max_tokens, seed"),
        ("a;temperature=-1", "temperature='-1'"),
        ("a;temperature=hot", "temperature='hot'"),
        ("a;max_tokens=0", "max_tokens='0'"),
        ("a;seed=-1", "seed='-1'"),
    ],
)
async def test_wrong_parameters_are_refused_with_their_name(tmp_path: Path, name: str, words: str) -> None:
    async with serving(tmp_path) as served, httpx.AsyncClient(base_url=served.url) as http:
        refused = await http.post(f"/s/{name}/v1/chat/completions", json=BODY | {"model": "base"})
    assert refused.status_code == 422 and words in refused.json()["error"]["message"]


def test_a_name_with_parameters_is_read_as_it_was_written() -> None:
    parameters = Sampling(temperature=0, top_p=0.5, max_tokens=7, seed=5, base=True)
    assert sampling.read(sampling.write("a", parameters)) == ("a", parameters)
    assert sampling.write("a", Sampling(base=True)) == "a" and sampling.read("a") == ("a", Sampling())
