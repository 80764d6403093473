"""A session without an answer of its model: who answered, and what to do."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import art
from art_protocol.wire import NOT_DELIVERED, NOT_ENDED
from art_server.api.refused_keys import MAX_KEYS, RefusedKeys
from art_server.errors import Unauthorized
from art_server.settings import ApiKey
from art_server.shared.refusals import MAX_CAUSES, MAX_SESSIONS, Refusals
from tests.quick.server.served import Served, serving
from tests.waiting import until

pytestmark = pytest.mark.anyio

KEYS = (
    ApiKey(key="all"),
    ApiKey(key="p-key", projects=frozenset({"p"})),
    ApiKey(key="q-key", projects=frozenset({"q"})),
)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path, api_keys=KEYS) as served:
        async with art.Backend(served.url, "all") as backend:
            for project, name in (("p", "a"), ("p", "b"), ("q", "c")):
                await art.TrainableModel(name=name, project=project, base_model="art/tiny").register(backend)
        yield served


async def ask(served: Served, path: str, model: str, key: str, question: str = "q") -> int:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": question}]}
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=served.url, headers=headers) as http:
        return (await http.post(f"{path}/chat/completions", json=body)).status_code


async def why_empty(served: Served, *models: str, key: str = "all", agents_key: str | None = None) -> str | None:
    """What a rollout's trajectory logs whose agent asked these models."""
    async with art.Backend(served.url, key) as backend:
        model = art.TrainableModel(name="a", project="p", base_model="art/tiny")
        await model.register(backend)
        async with art.rollout(model) as rollout:
            for number, name in enumerate(models):  # the same question would make a model the other's fallback
                path = rollout.base_url.removeprefix(served.url)
                await ask(served, path, name, agents_key or key, f"question {number}")
            trajectory = await rollout.trajectory()
    assert len(trajectory.logs) <= 1
    return trajectory.logs[0].partition(" that can be trained: ")[2] if trajectory.logs else None


async def test_each_cause_has_its_own_sentence(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    remedy = "The agent has to send model='p/a'"
    assert await why_empty(served, "p/a", "base") is None
    base = "2 of its answers came from the base model art/tiny, which is not trained"
    assert await why_empty(served, "base", "base") == f"{base}. {remedy}"
    assert base in caplog.text
    other = "1 of its answers came from the model q/c"
    trajectory = "; the answers of q/c are in r.trajectory(model=...) of that model"
    assert await why_empty(served, "q/c") == f"{other}. {remedy}{trajectory}"
    unknown = "1 of its requests named 'gpt-4o', which is no model here"
    aliases = ", or art.rollout(..., aliases={...}) says what its own names mean"
    assert await why_empty(served, "gpt-4o") == f"{unknown}. {remedy}{aliases}"
    mixed = await why_empty(served, "base", "gpt-4o", "q/c", "base")
    assert mixed == f"{base}; {other}; {unknown}. {remedy}{aliases}{trajectory}"
    refused = "2 requests that name the session were refused: unknown API key"
    remedy = "The agent needs the rollout's api_key, or another key with the scope infer"
    assert await why_empty(served, "p/a", "p/a", agents_key="wrong-key") == f"{refused}. {remedy}"
    silent = await why_empty(served)
    assert silent is not None and silent.startswith(
        "the agent sent no request that names the session. Give it base_url="
    )


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_agent_that_hangs_up_sent_a_request(served: Served, is_stream: bool) -> None:
    gate = served.server.gate
    gate.close("p/a")
    async with art.Backend(served.url, "all") as backend:
        model = art.TrainableModel(name="a", project="p", base_model="art/tiny")
        await model.register(backend)
        rollout = art.rollout(model)
        question: Any = {"role": "user", "content": "question"}
        asked = {"model": "p/a", "messages": [question], "n": 2, "stream": is_stream}
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {rollout.api_key}"}, timeout=None) as http:
            asking = asyncio.create_task(http.post(f"{rollout.base_url}/chat/completions", json=asked))
            await until(lambda: gate.num_waiting == 1)
            waiting = await rollout.trajectory()
            asking.cancel()
        await until(lambda: gate.num_waiting == 0)
        gate.open()
        trajectory = await rollout.trajectory()
    none = "the agent asked for 2 answers, of which none was finished; 2 of its answers were left out"
    assert f"{none}: {NOT_ENDED}" in waiting.logs[-1] and f"{none}: {NOT_DELIVERED}" in trajectory.logs[-1]
    assert trajectory.metrics["unused_choices"] == 2
    assert f"2 of its answers were left out: {NOT_DELIVERED}. " in trajectory.logs[-1]


async def test_others_see_neither_models_nor_callers(served: Served) -> None:
    for name in ("q/c", "base", "gpt-4o"):
        reason = await why_empty(served, name, key="p-key", agents_key="q-key")
        assert reason is not None and reason.startswith("the agent sent no request"), name
    assert "came from the model q/c" in (await why_empty(served, "q/c", agents_key="q-key") or "")


async def test_a_refused_key_is_one_line_of_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for key in ("wrong-key", "wrong-key", "other-key", "wrong-key::session-1"):
        assert await ask(served, "/v1", "p/a", key) == 401
    lines = [record.getMessage() for record in caplog.records if "was refused" in record.getMessage()]
    assert (
        len(lines) == 2 and "a request of 127.0.0.1 to '/v1/chat/completions' was refused: unknown API key" in lines[0]
    )
    assert "-key" not in caplog.text


def test_a_minute_has_few_lines_of_refused_keys(caplog: pytest.LogCaptureFixture) -> None:
    keys, error = RefusedKeys(), Unauthorized("unknown API key: ask", code="wrong_key")
    for number in range(10 * MAX_KEYS):
        keys.add(error, f"key {number}", "s", "/v1/models", "127.0.0.1")
    assert len(caplog.records) == MAX_KEYS
    assert keys.of_session("s") == {"unknown API key": 10 * MAX_KEYS} and keys.of_session("t") == {}


def test_refusals_are_bounded() -> None:
    names = Refusals()
    for number in range(MAX_CAUSES + 1):
        names.add("me", "s", f"{number}")
    names.add("me", "s", "0")
    assert names.of_session("me", "s") == {"0": 2, **{str(number): 1 for number in range(1, MAX_CAUSES)}}
    assert names.of_session("you", "s") == {}
    for number in range(MAX_SESSIONS):
        names.add("me", f"{number}", "x")
    assert names.of_session("me", "s") == {}
