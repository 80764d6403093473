"""Names of an agent's own in a session: what an alias says they mean, what is trained, and what an unknown name is told."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

import art
from art_protocol import sampling
from tests.quick.server.served import Served, serving

pytestmark = pytest.mark.anyio
ALIASES = {"claude-haiku-*": "base", "gpt-5*": "p/m", "openrouter/*:free": "m", "old": "p/m@0"}


async def make_model(backend: art.Backend) -> art.TrainableModel:
    model = art.TrainableModel(name="m", project="p", base_model="art/tiny")
    await model.register(backend)
    return model


async def ask(served: Served, path: str, name: str, question: str = "q", **headers: str) -> httpx.Response:
    body = {"model": name, "messages": [{"role": "user", "content": question}]}
    async with httpx.AsyncClient(headers=headers) as http:
        return await http.post(f"{path}/chat/completions", json=body)


@pytest.mark.parametrize("way", ["url", "key", "header"])
async def test_an_alias_of_the_model_trains_and_one_of_the_base_model_does_not(tmp_path: Path, way: str) -> None:
    async with serving(tmp_path) as served, art.Backend(served.url) as backend:
        model = await make_model(backend)
        async with art.rollout(model, "a", aliases=ALIASES, sampling={"temperature": 0.25}) as r:
            path = r.base_url if way == "url" else f"{served.url}/v1"
            ways = {"url": {}, "key": {"authorization": f"Bearer {r.api_key}"}}
            headers = ways.get(way, {"x-art-session": r.session_in_requests})
            for number, name in enumerate(["claude-haiku-4-5-20251001", "gpt-5-mini", "openrouter/x/y:free", "p/m"]):
                answered = await ask(served, path, name, f"question {number}", **headers)
                assert answered.status_code == 200 and answered.json()["model"] == name, answered.text
            trajectory = await r.trajectory(1.0)
        asked = served.engine.vllm.chats
        assert asked[0]["model"] == "base" and asked[0].get("temperature") is None
        assert {body["model"] for body in asked[1:]} == {"p/m@0"} and {body["temperature"] for body in asked[1:]} == {
            0.25
        }
    histories: list[art.Trajectory | art.History] = [trajectory, *trajectory.additional_histories]
    questions = [history.messages()[0].get("content") for history in histories]
    assert questions == ["question 1", "question 2", "question 3"]


async def test_a_known_name_wins_over_an_alias_and_a_step_stays_named(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, art.Backend(served.url) as backend:
        model = await make_model(backend)
        async with art.rollout(model, "a", aliases={"*": "base", "old": "p/m@0"}) as r:
            for name in ("p/m", "m", "unknown"):
                assert (await ask(served, r.base_url, name)).status_code == 200
        async with art.rollout(model, "b", aliases={"old": "p/m@0", "claude@20250514": "p/m"}) as r:
            for name, question in (("old", "frozen"), ("claude@20250514", "newest")):
                assert (await ask(served, r.base_url, name, question)).status_code == 200
            trajectory = await r.trajectory()
        assert [body["model"] for body in served.engine.vllm.chats] == ["p/m@0", "p/m@0", "base", "p/m@0", "p/m@0"]
    assert trajectory.messages()[0].get("content") == "newest" and trajectory.metrics["unused_choices"] == 1


async def test_an_unknown_name_in_a_session_is_told_of_aliases(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, art.Backend(served.url) as backend:
        model = await make_model(backend)
        async with art.rollout(model, "a", aliases={"gpt-*": "p/none"}) as r:
            inside = await ask(served, r.base_url, "claude-haiku-4-5")
            outside = await ask(served, f"{served.url}/v1", "claude-haiku-4-5")
            wrong = await ask(served, r.base_url, "gpt-5")
            trajectory = await r.trajectory()
    for answer in (inside, outside, wrong):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_model")
    remedy = "art.rollout(..., aliases={'claude-haiku-4-5': 'base'})"
    assert remedy in inside.json()["error"]["message"] and remedy not in outside.json()["error"]["message"]
    assert "no model 'p/none'" in wrong.json()["error"]["message"]
    assert "art.rollout(..., aliases={...})" in trajectory.logs[-1]


def test_aliases_round_trip_behind_a_session_s_name() -> None:
    parameters = sampling.checked({"temperature": 0.5, "aliases": ALIASES})
    name = sampling.write("a", parameters)
    assert "/" not in name and sampling.read(name) == ("a", parameters)
    assert [parameters.meaning_of(said) for said in ("claude-haiku-4", "openrouter/a/b:free", "claude-opus")] == [
        "base",
        "m",
        None,
    ]


@pytest.mark.parametrize("aliases", [{"a;b": "base"}, {"": "base"}, {"a": ""}, {"a": "b c"}, {"a[0]": "base"}])
async def test_a_wrong_alias_is_refused_in_one_sentence(tmp_path: Path, aliases: Mapping[str, str]) -> None:
    async with serving(tmp_path) as served, art.Backend(served.url) as backend:
        model = await make_model(backend)
        with pytest.raises(ValueError, match=r"aliases: .*: an alias has the agent's name"):
            art.rollout(model, aliases=aliases)
        refused: Any = await ask(served, f"{served.url}/s/x;alias=base/v1", "p/m")
    assert refused.status_code == 422 and refused.json()["error"]["code"] == "invalid_sampling"


async def test_an_alias_is_a_model_that_can_be_asked_for(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, art.Backend(served.url) as backend:
        model = await make_model(backend)
        async with art.rollout(model, "a", aliases=ALIASES) as r, httpx.AsyncClient() as http:
            for name in ("claude-haiku-4-5", "openrouter/x/y:free", "p/m"):
                answered = await http.get(f"{r.base_url}/models/{name}")
                assert answered.status_code == 200 and answered.json()["id"] == name, answered.text
            assert (await http.get(f"{r.base_url}/models/unknown")).status_code == 404
            assert (await http.get(f"{served.url}/v1/models/claude-haiku-4-5")).status_code == 404
