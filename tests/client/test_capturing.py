import asyncio
import json
import subprocess
import sys
import urllib.request

import aiohttp
import httpx
import httpx2
import openai
import pytest
import requests

import art
from art.compat import patches

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
BODY = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def sessions(server, answer) -> dict[str | None, int]:
    """Chat requests by session. A session's trajectory is one turn for each of its requests."""
    num_requests: dict[str | None, int] = {}

    def complete(request):
        session = request.headers.get("x-art-session")
        num_requests[session] = num_requests.get(session, 0) + 1
        if session is not None:
            keep(session, num_requests[session])
        return answer(body={"id": "c", "model": "m", "choices": [to_choice("yes")]})

    def keep(session: str, count: int):
        entries = [*BODY["messages"], *(to_choice(f"turn {n}") for n in range(count))]
        history = {"messages_and_choices": entries}
        reply = answer(body={"histories": [history], "num_choices": count})
        server.on("GET", f"/api/models/demo/agent/sessions/{session}", reply)

    server.on("POST", PATH, complete)
    return num_requests


def to_choice(content: str) -> dict:
    message = {"role": "assistant", "content": content}
    return {"index": 0, "finish_reason": "stop", "message": message}


async def ask(model: art.TrainableModel) -> None:
    await model.openai_client().chat.completions.create(**BODY)


async def test_the_object_inside_the_coroutine_is_the_one_that_is_filled(
    sessions, model: art.TrainableModel
):
    async def run() -> str:
        await ask(model)
        inside = art.auto_trajectory(required=True)
        inside.reward, inside.metadata["place"] = 0.7, "inside"
        seen.append(inside)
        await ask(model)
        return "dropped"

    seen: list[art.Trajectory] = []
    trajectory = await art.capture_auto_trajectory(run())
    assert trajectory is seen[0]
    assert [m.get("content") for m in trajectory.messages()] == ["hi", "turn 0", "turn 1"]
    assert trajectory.reward == 0.7 and trajectory.metadata == {"place": "inside"}
    assert trajectory.metrics["duration"] >= 0
    assert sessions.keys() != {None} and list(sessions.values()) == [2]


async def test_outside_of_a_scope_there_is_no_trajectory(sessions, model: art.TrainableModel):
    assert art.auto_trajectory() is None and art.current_trajectory() is None
    for spelling in ("required", "require"):
        with pytest.raises(RuntimeError, match="no trajectory is being captured here"):
            art.current_trajectory(**{spelling: True})
    await ask(model)
    assert sessions == {None: 1}


def ask_with_requests(client: requests.Session, url: str) -> None:
    assert client.post(url, json=BODY).status_code == 200


async def test_every_http_client_is_captured_also_one_made_before(
    server, sessions, model: art.TrainableModel
):
    url = server.url + PATH
    aio, of_requests = aiohttp.ClientSession(), requests.Session()
    clients = [httpx.AsyncClient(), httpx2.AsyncClient()]
    sync_clients = [httpx.Client(), httpx2.Client()]
    openai_client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="default")

    async def run() -> None:
        for client in clients:
            assert (await client.post(url, json=BODY)).status_code == 200
        for client in sync_clients:
            await asyncio.to_thread(client.post, url, json=BODY)
        async with aio.post(url, json=BODY) as response:
            assert response.status == 200
        await asyncio.to_thread(ask_with_requests, of_requests, url)
        await openai_client.chat.completions.create(**BODY)
        await openai_client.with_options(max_retries=1).chat.completions.create(**BODY)
        # another name of this machine, as programs write it by hand
        assert (await clients[0].post(url.replace("127.0.0.1", "localhost"), json=BODY)).is_success

    trajectory = await art.trajectory(run())
    assert len(trajectory.messages_and_choices) == 10
    assert list(sessions.values()) == [9] and None not in sessions
    async with aio.post(url, json=BODY):
        assert sessions[None] == 1
    of_requests.close()
    for client in sync_clients:
        client.close()
    for client in [aio, *clients, openai_client]:
        await (client.aclose() if hasattr(client, "aclose") else client.close())


async def test_other_servers_and_other_routes_get_no_header(
    server, make_server, sessions, answer, model: art.TrainableModel
):
    async def run() -> None:
        async with httpx.AsyncClient() as client:
            await client.post(stranger.url + PATH, json=BODY)
            await client.get(server.url + "/health")
            await client.post(server.url + "/s/own/v1/chat/completions", json=BODY)
        await model.get_step()

    stranger = make_server()
    await stranger.start()
    trajectory = await art.trajectory(run())
    await stranger.stop()
    assert trajectory.messages_and_choices == []
    assert not any("x-art-session" in r.headers for r in server.requests + stranger.requests)


async def test_a_header_that_the_request_has_stays(server, sessions, model: art.TrainableModel):
    async def run() -> None:
        async with httpx.AsyncClient() as client:
            headers = {"X-ART-Session": "own"}
            await client.post(server.url + PATH, json=BODY, headers=headers)

    keep_nothing = {"histories": [], "num_choices": 0}
    server.routes["GET", "/api/models/demo/agent/sessions/own"] = lambda _: keep_nothing
    with pytest.raises(art.ArtStatusError):  # the scope's own session was never begun
        await art.trajectory(run())
    assert sessions == {"own": 1}


@pytest.mark.parametrize("is_closed", [False, True])
async def test_another_backend_of_the_same_server_does_not_hide_the_model(
    server, sessions, model: art.TrainableModel, is_closed: bool
):
    others = [art.Backend(server.url) for _ in range(4)]
    for backend in others:
        other = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
        await other.register(backend)
        if is_closed:
            await backend.close()
    trajectory = await art.trajectory(ask(model))
    assert len(trajectory.messages_and_choices) == 2 and not trajectory.additional_histories
    assert [backend._connection.is_open for backend in others] == [not is_closed] * 4
    for backend in others:
        await backend.close()


async def test_no_capture_hides_a_judge(sessions, model: art.TrainableModel):
    async def run() -> None:
        await ask(model)
        with art.no_capture():
            assert art.current_trajectory() is None
            await ask(model)

    trajectory = await art.trajectory(run())
    assert len(trajectory.messages_and_choices) == 2
    assert sorted(sessions.values()) == [1, 1] and sessions[None] == 1


async def test_requests_of_a_nested_rollout_are_its_own(
    server, sessions, model: art.TrainableModel
):
    async def run() -> None:
        await ask(model)
        async with art.rollout(model, "nested"), httpx.AsyncClient() as client:
            await ask(model)
            await client.post(server.url + PATH, json=BODY)  # a rollout names its session itself

    await art.trajectory(run())
    assert sessions["nested"] == 1 and sessions[None] == 1 and len(sessions) == 3


async def test_a_failure_passes_and_leaves_the_scope(sessions, model: art.TrainableModel):
    async def run() -> None:
        raise ValueError("no such tool")

    with pytest.raises(ValueError, match="no such tool"):
        await art.trajectory(run())
    assert art.current_trajectory() is None
    task = asyncio.create_task(asyncio.sleep(0))
    with pytest.raises(TypeError, match="a task has its own context"):
        await art.trajectory(task)  # type: ignore[arg-type]
    await task


async def test_group_of_captured_trajectories(sessions, model: art.TrainableModel):
    async def run(reward: float) -> None:
        await ask(model)
        art.current_trajectory(required=True).reward = reward
        if reward > 1:
            raise ValueError("too much")

    def captured(*rewards: float):
        return [art.trajectory(run(reward)) for reward in rewards]

    group = await art.trajectory_group(captured(0.0, 1.0), metadata={"scenario": 3})
    assert [t.reward for t in group] == [0.0, 1.0] and group.metadata == {"scenario": 3}
    assert len(sessions) == 2
    with pytest.raises(ValueError, match="too much"):
        await art.trajectory_group(captured(0.0, 2.0))
    group = await art.trajectory_group(captured(0.0, 2.0), return_exceptions=True)
    assert len(group) == 1 and group.exceptions[0].message == "too much"
    (group,) = await art.gather_trajectory_groups(
        [art.trajectory_group(captured(0.0, 2.0))], pbar_desc=None, max_exceptions=1
    )
    assert len(group.exceptions) == 1


async def test_what_the_coroutine_put_there_stays(sessions, model: art.TrainableModel):
    async def run() -> None:
        await ask(model)
        art.current_trajectory(required=True).messages_and_choices.append(BODY["messages"][0])

    trajectory = await art.trajectory(run())
    assert trajectory.messages() == BODY["messages"]
    assert len(trajectory.additional_histories) == 1


def test_the_patch_is_installed_once_and_by_capture_only():
    program = f"""
import asyncio, json
import aiohttp, art, httpx, httpx2, requests
methods = {patches._PATCHED_METHODS!r}
def current(): return [getattr(getattr(globals()[m], c), f) for m, c, f in methods]
before = current()
backend = art.Backend("http://127.0.0.1:1")
unpatched = current() == before
async def run(): pass
asyncio.run(art.trajectory(run()))
once = current()
asyncio.run(art.trajectory(run()))
print(json.dumps([unpatched, [a is not b for a, b in zip(before, once)], current() == once]))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(run.stdout) == [True, [True] * 6, True]


async def test_urllib_is_not_captured_which_the_docs_say(
    server, sessions, model: art.TrainableModel
):
    def ask_with_urllib() -> None:
        request = urllib.request.Request(server.url + PATH, json.dumps(BODY).encode())
        urllib.request.urlopen(request).close()

    await art.trajectory(asyncio.to_thread(ask_with_urllib))
    assert sessions == {None: 1}
