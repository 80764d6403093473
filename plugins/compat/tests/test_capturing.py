import asyncio
import gzip
import http.client
import json
import queue
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import httpx2
import openai
import pytest
import requests
import urllib3

import art
from art import other_providers, patches

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


async def test_the_object_inside_the_coroutine_is_the_one_that_is_filled(sessions, model: art.TrainableModel):
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
        with pytest.raises(RuntimeError, match=r"art\.trajectory"):
            art.current_trajectory(**{spelling: True})
    await ask(model)
    assert sessions == {None: 1}


def ask_with_requests(client: requests.Session, url: str) -> None:
    assert client.post(url, json=BODY).status_code == 200


async def test_every_http_client_is_captured_also_one_made_before(server, sessions, model: art.TrainableModel):
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


def ask_with_urllib(url: str) -> None:
    request = urllib.request.Request(url, json.dumps(BODY).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        assert response.status == 200


async def test_clients_on_python_s_own_connections_are_captured(server, sessions, model: art.TrainableModel):
    url = server.url + PATH
    pool = urllib3.PoolManager()
    connection = http.client.HTTPConnection(urlsplit(url).netloc)

    def ask_with_connection() -> None:
        for _ in range(2):  # the second request on the same connection
            connection.request("POST", PATH, json.dumps(BODY), {"Content-Type": "application/json"})
            assert connection.getresponse().read()

    async def run() -> None:
        await asyncio.to_thread(ask_with_urllib, url)
        await asyncio.to_thread(pool.request, "POST", url, json=BODY)
        await asyncio.to_thread(ask_with_connection)

    await art.trajectory(run())
    assert list(sessions.values()) == [4] and None not in sessions
    await asyncio.to_thread(ask_with_urllib, url)
    assert sessions[None] == 1
    connection.close()
    pool.clear()


async def test_a_header_that_a_caller_writes_into_python_s_own_connection_stays(server, sessions, model):
    async def run() -> None:
        request = urllib.request.Request(server.url + PATH, json.dumps(BODY).encode(), {"X-ART-Session": "own"})
        with await asyncio.to_thread(urllib.request.urlopen, request) as response:
            assert response.status == 200

    with pytest.raises(art.ArtStatusError):  # the scope's own session was never begun
        await art.trajectory(run())
    assert sessions == {"own": 1}


async def test_threads_that_an_agent_starts_belong_to_its_session(server, sessions, model: art.TrainableModel):
    """A thread, a pool of its own, a pool that two agents share, and the loop's own executor."""
    url = server.url + PATH
    shared = ThreadPoolExecutor(1)

    def agent() -> None:
        thread = threading.Thread(target=ask_with_urllib, args=(url,))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ask_with_urllib, [url, url]))
        shared.submit(ask_with_urllib, url).result()

    async def run() -> None:
        await asyncio.to_thread(agent)
        await asyncio.get_running_loop().run_in_executor(None, ask_with_urllib, url)

    await art.trajectory(run())
    await art.trajectory(run())
    assert list(sessions.values()) == [5, 5] and None not in sessions
    await asyncio.to_thread(shared.submit(ask_with_urllib, url).result)
    assert sessions[None] == 1, "outside of a scope a pool's thread has none"
    shared.shutdown()


async def test_a_thread_that_outlives_its_scope_belongs_to_no_session(server, sessions, model: art.TrainableModel):
    work: queue.Queue[threading.Event | None] = queue.Queue()

    def serve() -> None:
        while (done := work.get()) is not None:
            ask_with_urllib(server.url + PATH)
            done.set()

    async def ask_thread() -> None:
        done = threading.Event()
        work.put(done)
        await asyncio.to_thread(done.wait)

    async def run() -> None:
        thread.start()
        await ask_thread()

    thread = threading.Thread(target=serve)
    await art.trajectory(run())
    await ask_thread()
    assert list(sessions.values()) == [1, 1] and None in sessions
    work.put(None)
    thread.join()


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


async def test_a_deleted_model_does_not_end_the_captures_of_others(
    server, answer, sessions, backend: art.Backend, model: art.TrainableModel
):
    info = {"name": "twin", "project": "demo", "base_model": "art/tiny", "lora": {}, "step": 0}
    server.on("POST", "/api/models", answer(body={**info, "inference_name": "demo/twin"}))
    twins = []
    for _ in range(2):
        twin = art.TrainableModel(name="twin", project="demo", base_model="art/tiny")
        await twin.register(backend)
        twins.append(twin)
    error = {"code": "unknown_model", "message": "there is no model 'demo/twin'"}
    server.otherwise = lambda _: answer(404, {"error": error})
    assert len((await art.trajectory(ask(model))).messages_and_choices) == 2
    server.on("DELETE", "/api/models/demo/twin", answer(body={**info, "inference_name": "x"}))
    await twins[0].delete()
    server.requests.clear()
    assert len((await art.trajectory(ask(model))).messages_and_choices) == 2
    assert not [request for request in server.requests if "/demo/twin" in request.path]


async def test_no_capture_hides_a_judge(sessions, model: art.TrainableModel):
    async def run() -> None:
        await ask(model)
        with art.no_capture():
            assert art.current_trajectory() is None
            await ask(model)

    trajectory = await art.trajectory(run())
    assert len(trajectory.messages_and_choices) == 2
    assert sorted(sessions.values()) == [1, 1] and sessions[None] == 1


async def test_requests_of_a_nested_rollout_are_its_own(server, sessions, model: art.TrainableModel):
    async def run() -> None:
        await ask(model)
        async with art.rollout(model, "nested"), httpx.AsyncClient() as client:
            await ask(model)
            await client.post(server.url + PATH, json=BODY)  # a rollout names its session itself

    await art.trajectory(run())
    assert sessions["nested"] == 1 and sessions[None] == 1 and len(sessions) == 3


async def test_a_failure_passes_and_leaves_the_scope(sessions, model: art.TrainableModel):
    failure = ValueError("no such tool")

    async def run(num_requests: int) -> None:
        for _ in range(num_requests):
            await ask(model)
        raise failure

    with pytest.raises(ValueError) as caught:
        await art.trajectory(run(0))
    assert caught.value is failure and not hasattr(failure, "__notes__"), "there is nothing to show"
    with pytest.raises(ValueError):
        await art.trajectory(run(1))
    (session,) = sessions
    command = f"`art show demo/agent --session {session} --url {model.backend().base_url}`"
    assert failure.__notes__ == [f"{command} shows what it was answered, if it asked the model"]
    assert art.current_trajectory() is None
    task = asyncio.create_task(asyncio.sleep(0))
    with pytest.raises(TypeError, match="task"):
        await art.trajectory(task)  # type: ignore[arg-type]
    await task


class TooMuch(Exception):
    pass


async def test_group_of_captured_trajectories(sessions, model: art.TrainableModel):
    async def run(reward: float) -> None:
        await ask(model)
        art.current_trajectory(required=True).reward = reward
        if reward > 1:
            raise TooMuch("too much")

    def captured(*rewards: float):
        return [art.trajectory(run(reward)) for reward in rewards]

    group = await art.trajectory_group(captured(0.0, 1.0), metadata={"scenario": 3})
    assert [t.reward for t in group] == [0.0, 1.0] and group.metadata == {"scenario": 3}
    assert len(sessions) == 2
    with pytest.raises(TooMuch):
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


METHODS = [
    *patches._PATCHED_METHODS,
    ("http.client", "HTTPConnection", "putrequest"),
    ("http.client", "HTTPConnection", "putheader"),
    ("http.client", "HTTPConnection", "endheaders"),
    ("threading", "Thread", "start"),
    ("concurrent.futures", "ThreadPoolExecutor", "submit"),
]


def test_the_patch_is_installed_once_and_by_capture_only():
    program = f"""
import asyncio, concurrent.futures, http.client, json, sys, threading
import aiohttp, art, httpx, httpx2
methods = {METHODS!r}
def current(): return [getattr(getattr(sys.modules[m], c), f) for m, c, f in methods]
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
    assert json.loads(run.stdout) == [True, [True] * len(METHODS), True]


@pytest.fixture
async def elsewhere(make_server, answer):
    """Another server: it answers "yes", and where it streams a call of a tool, compressed."""
    other = make_server()

    def complete(request):
        if b'"stream"' in request.body:
            return answer(body=gzip.compress(streamed()), headers={"content-encoding": "gzip"})
        return answer(body={"id": "c", "model": "m", "choices": [to_choice("yes")]})

    other.on("POST", "/openai/chat/completions", complete)
    await other.start()
    yield other
    await other.stop()


def streamed() -> bytes:
    call = {"index": 0, "id": "call-1", "function": {"name": "look", "arguments": '{"at":'}}
    deltas = [
        {"role": "assistant", "content": "let "},
        {"content": "me"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ' "it"}'}}]},
    ]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    chunks = [{"id": "c", "object": "chat.completion.chunk", "choices": [choice]} for choice in choices]
    usage = {"id": "c", "object": "chat.completion.chunk", "choices": []}
    return b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in [*chunks, usage]) + (b"data: [DONE]\n\n")


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


async def test_answers_of_another_server_are_captured(elsewhere):
    client: Any = openai.AsyncOpenAI(base_url=f"{elsewhere.url}/openai", api_key="key")
    hi, yes = BODY["messages"][0], {"role": "assistant", "content": "yes"}

    async def run() -> None:
        await client.chat.completions.create(model="m", messages=[hi])
        await client.chat.completions.create(model="m", messages=[hi, yes, hi])
        async for _ in await client.chat.completions.create(model="m", messages=[hi], tools=TOOLS, stream=True):
            pass
        with art.no_capture():
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "judge"}])
        await asyncio.to_thread(ask_with_httpx, f"{elsewhere.url}/openai/chat/completions")
        await asyncio.to_thread(httpx.get, f"{elsewhere.url}/openai/chat/completions")

    trajectory = await art.trajectory(run())
    await client.close()
    assert [m.get("content") for m in trajectory.messages()] == ["hi", "yes", "hi", "yes"]
    assert not isinstance(trajectory.messages_and_choices[1], dict), "an answer, not a message"
    with_tools, alone = trajectory.additional_histories
    choice: Any = with_tools.messages_and_choices[1]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "let me"
    (call,) = choice.message.tool_calls
    assert (call.id, call.function.name) == ("call-1", "look")
    assert json.loads(call.function.arguments) == {"at": "it"} and with_tools.tools == TOOLS
    assert [m.get("content") for m in alone.messages()] == ["alone", "yes"]


def ask_with_httpx(url: str) -> None:
    messages = [{"role": "user", "content": "alone"}]
    assert httpx.post(url, json={"model": "m", "messages": messages}).is_success


async def test_a_judge_elsewhere_is_no_part_of_a_rollout_of_the_policy(sessions, elsewhere, model: art.TrainableModel):
    judge = openai.AsyncOpenAI(base_url=f"{elsewhere.url}/openai", api_key="key")

    async def run() -> None:
        await ask(model)
        await judge.chat.completions.create(model="m", messages=BODY["messages"])

    trajectory = await art.trajectory(run())
    await judge.close()
    assert [m.get("content") for m in trajectory.messages()] == ["hi", "turn 0"]
    assert not trajectory.additional_histories


async def test_answers_elsewhere_count_if_the_policy_gave_none(server, answer, elsewhere, model: art.TrainableModel):
    def complete(request):
        nothing = answer(body={"histories": [], "num_choices": 0})
        session = request.headers["x-art-session"]
        server.on("GET", f"/api/models/demo/agent/sessions/{session}", nothing)
        return answer(body={"id": "c", "model": "base", "choices": [to_choice("base")]})

    async def run() -> None:
        async with httpx.AsyncClient() as client:
            await client.post(server.url + PATH, json={**BODY, "model": "art/tiny"})
        await asyncio.to_thread(ask_with_httpx, f"{elsewhere.url}/openai/chat/completions")

    server.on("POST", PATH, complete)  # the base model, on the policy's server
    trajectory = await art.trajectory(run())
    assert [m.get("content") for m in trajectory.messages()] == ["alone", "yes"]


async def test_a_policy_whose_answers_are_unused_leaves_no_room_for_others(
    server, answer, elsewhere, model: art.TrainableModel
):
    def complete(request):
        dropped = answer(body={"histories": [], "num_choices": 0, "unused": {"cut off": 1}})
        session = request.headers["x-art-session"]
        server.on("GET", f"/api/models/demo/agent/sessions/{session}", dropped)
        return answer(body={"id": "c", "model": "m", "choices": [to_choice("yes")]})

    async def run() -> None:
        await ask(model)
        await asyncio.to_thread(ask_with_httpx, f"{elsewhere.url}/openai/chat/completions")

    server.on("POST", PATH, complete)
    trajectory = await art.trajectory(run())
    assert trajectory.messages() == [] and trajectory.metrics["unused_choices"] == 1


def test_a_streamed_answer_may_have_lists_in_its_parts():
    deltas: list[Any] = [
        {"delta": {"content": "a", "reasoning_details": [{"text": "b"}], "score": 1}},
        {"delta": {"content": "c", "reasoning_details": [{"text": "d"}], "score": 2}},
        {"delta": {}, "finish_reason": "stop"},
    ]
    lines = [json.dumps({"choices": [delta]}) for delta in deltas]
    stream = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()
    (choice,) = other_providers._join(other_providers._chunks(stream.decode()))
    message = choice["message"]
    assert (message["content"], message["score"]) == ("ac", 2)
    assert message["reasoning_details"] == [{"text": "b"}, {"text": "d"}]


async def test_a_streamed_answer_may_contain_any_line_separator(elsewhere, answer):
    text = "a\u2028b\u2029c\x85d"
    deltas = [{"delta": {"content": text}}, {"delta": {}, "finish_reason": "stop"}]
    lines = [json.dumps({"choices": [delta]}, ensure_ascii=False) for delta in deltas]
    stream = "".join(f"data: {line}\r\n\r\n" for line in [*lines, "[DONE]"]).encode()
    elsewhere.on("POST", "/openai/chat/completions", lambda _: answer(body=stream))

    async def run() -> None:
        async with httpx.AsyncClient() as client:
            await client.post(f"{elsewhere.url}/openai/chat/completions", json={**BODY, "stream": True})

    trajectory = await art.trajectory(run())
    assert [m.get("content") for m in trajectory.messages()] == ["hi", text]


async def test_what_is_no_chat_completion_is_left_out_with_a_warning(
    elsewhere, answer, caplog: pytest.LogCaptureFixture
):
    url = f"{elsewhere.url}/openai/chat/completions"
    odd = [b"<html>", {"choices": None}, {"choices": [{"message": {"role": "user"}}]}, [], None]
    elsewhere.on("POST", "/other/chat/completions", lambda _: answer(body=odd.pop()))

    async def run() -> None:
        async with httpx.AsyncClient() as client:
            for _ in range(len(odd)):
                await client.post(url.replace("openai", "other"), json=BODY)
            await client.post(url, json={"model": "m", "messages": ["no message"]})
            await client.post(url, content=b"no JSON")
            await client.post(url, json=BODY)

    trajectory = await art.trajectory(run())
    assert [m.get("content") for m in trajectory.messages()] == ["hi", "yes"]
    assert not trajectory.additional_histories
    assert caplog.text.count("an answer of another server is not captured") == 7
