"""What leaves a box: requests to the rollout's session, with the program's key, kept connections and streams."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import art
from art import harbor
from art.harbor.gateway import Gateway
from art.harbor.running import play
from plugins.harbor.tests.boxed import TASKS, needs_bubblewrap, write_task
from tests.fakes.server import Answer, FakeArt, FakeServer

pytestmark = pytest.mark.anyio

SESSION = "/s/mine;temperature=0.5"
KEY = "secret-key::mine"


@pytest.fixture
async def upstream() -> AsyncIterator[FakeServer]:
    server = FakeServer()
    server.otherwise = lambda request: Answer(body={"path": request.path})
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def port(upstream: FakeServer) -> AsyncIterator[int]:
    """A port on which a gateway answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    number = listener.getsockname()[1]
    async with Gateway(upstream.url + SESSION, KEY).serving(listener):
        yield number


async def talk(port: int, *requests: bytes) -> list[bytes]:
    """The gateway's answers to requests over one connection: each answer's status and body, up to the gateway's end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers: list[bytes] = []
    for request in requests:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        answers.append(head.split()[1] + b" " + await reader.readexactly(length))
    writer.close()
    return answers


def request(target: str, *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", "Host: box", *headers, "", ""]).encode() + body


async def test_requests_of_a_kept_connection_go_to_the_session_with_the_key(upstream: FakeServer, port: int) -> None:
    bodies = [b'{"a": 1}', b'{"b": 22}']
    sent = [
        request(f"{SESSION}/v1/chat/completions", f"Content-Length: {len(body)}", method="POST", body=body)
        for body in bodies
    ]
    answers = await talk(port, *sent, request(f"{SESSION}/v1/models?a=b"), request(SESSION))
    assert [answer[:3] for answer in answers] == [b"200"] * 4
    assert [one.body for one in upstream.requests] == [*bodies, b"", b""]
    assert {one.headers["authorization"] for one in upstream.requests} == {f"Bearer {KEY}"}
    assert upstream.requests[2].path == f"{SESSION}/v1/models?a=b"


async def test_headers_that_name_another_session_or_key_are_removed(upstream: FakeServer, port: int) -> None:
    names = ("x-art-session", "X-Session-Id", "x-api-key", "Authorization", "x-art-step", "x-forwarded-for", "Upgrade")
    await talk(port, request(f"{SESSION}/v1/models", *(f"{name}: other" for name in names), "anthropic-beta: kept"))
    headers = upstream.requests[0].headers
    assert "other" not in headers.values() and headers["authorization"] == f"Bearer {KEY}"
    assert headers["anthropic-beta"] == "kept" and headers["host"] == f"127.0.0.1:{upstream.port}"


CHUNKS = "transfer-encoding: chunked"
REFUSED = {
    "the server's own routes": request("/api/models"),
    "no session": request("/v1/models"),
    "another session": request("/s/other/v1/models"),
    "another session's longer name": request(f"{SESSION}x/v1/models"),
    "a route outside of /v1": request(f"{SESSION}/api/models/demo/agent", method="DELETE"),
    "up": request(f"{SESSION}/v1/../../other/v1/models"),
    "up in code": request(f"{SESSION}/v1/%2e%2e/%2E./other/v1/models"),
    "another server": request("http://other/s/mine/v1/models"),
    "a tunnel": request("other:443", method="CONNECT"),
    "HTTP/1.0": b"GET " + SESSION.encode() + b"/v1/models HTTP/1.0\r\n\r\n",
    "no HTTP": b"hello\r\n\r\n",
    "two lengths": request(f"{SESSION}/v1/a", "content-length: 1", "content-length: 2", method="POST", body=b"a"),
    "a length and chunks": request(f"{SESSION}/v1/a", "content-length: 1", CHUNKS, method="POST", body=b"a"),
    "another encoding": request(f"{SESSION}/v1/a", "transfer-encoding: gzip, chunked", method="POST", body=b"a"),
    "a negative length": request(f"{SESSION}/v1/a", "content-length: -1", method="POST"),
    "a folded header": request(f"{SESSION}/v1/a", "a: b", " c: d"),
    "a header without a name": request(f"{SESSION}/v1/a", ": b"),
    "a space before the colon": request(f"{SESSION}/v1/a", "content-length : 1", method="POST", body=b"a"),
    "a bare line end": request(f"{SESSION}/v1/a", "a: b\nx-art-session: other"),
    "huge headers": request(f"{SESSION}/v1/a", "a: " + "b" * 100_000),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_in_the_session_is_refused(upstream: FakeServer, port: int, name: str) -> None:
    (answer,) = await talk(port, REFUSED[name])
    assert answer.startswith(b"403 ") and json.loads(answer[4:])["error"]["code"] == "outside_session"
    assert upstream.requests == []


WRONG_CHUNKS = {
    "another end": b"1\r\naXX0\r\n\r\n",
    "no size": b"x\r\n\r\n",
    "a trailer": b"0\r\nx-art-session: other\r\n\r\n",
}


@pytest.mark.parametrize("name", WRONG_CHUNKS)
async def test_wrong_chunks_end_the_connection(upstream: FakeServer, port: int, name: str) -> None:
    upstream.otherwise = lambda _: Answer(after=asyncio.Event())  # the server waits for the body
    (answer,) = await talk(port, request(f"{SESSION}/v1/a", CHUNKS, method="POST", body=WRONG_CHUNKS[name]))
    assert answer.startswith(b"403 ")


async def test_no_second_request_hides_in_a_body(upstream: FakeServer, port: int) -> None:
    hidden = request("/s/other/v1/models")
    first = request(f"{SESSION}/v1/a", f"content-length: {len(hidden)}", method="POST", body=hidden)
    assert len(await talk(port, first)) == 1
    assert [one.path for one in upstream.requests] == [f"{SESSION}/v1/a"] and upstream.requests[0].body == hidden


async def test_a_lost_server_is_an_error_that_can_be_retried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        free = unused.getsockname()[1]
    listener = socket.create_server(("127.0.0.1", 0))
    async with Gateway(f"http://127.0.0.1:{free}{SESSION}", KEY).serving(listener):
        (answer,) = await talk(listener.getsockname()[1], request(f"{SESSION}/v1/models"))
    assert answer.startswith(b"502 ") and json.loads(answer[4:])["error"]["retryable"] is True


async def test_a_stream_arrives_as_it_comes() -> None:
    goes_on = asyncio.Event()

    async def stream(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nd\r\n{"number": 1}\r\n')
        await goes_on.wait()
        writer.write(b'd\r\n{"number": 2}\r\n0\r\n\r\n')
        writer.close()

    body = b"2\r\n{}\r\n0\r\n\r\n"
    listener = socket.create_server(("127.0.0.1", 0))
    async with (
        await asyncio.start_server(stream, "127.0.0.1", 0) as server,
        Gateway(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{SESSION}", KEY).serving(listener),
    ):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(request(f"{SESSION}/v1/chat/completions", CHUNKS, method="POST", body=body))
        await reader.readuntil(b'{"number": 1}')
        goes_on.set()
        assert b'"number": 2' in await reader.readuntil(b"0\r\n\r\n")
        writer.close()


AGENT = r"""
import json, os, urllib.request
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": open("/art/instruction.md").read()}]}
for _ in range(2):
    request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), {"Authorization": "Bearer " + key})
    answer = json.load(urllib.request.urlopen(request))
open("answer.txt", "w").write(answer["choices"][0]["message"]["content"])
"""


@needs_bubblewrap
async def test_a_rollout_of_an_agent_in_a_box(tmp_path: Path) -> None:
    folder = write_task(
        tmp_path / "task",
        'env | grep -i -e openai -e anthropic -e secret; [ "$(cat answer.txt)" = maybe ]; echo $((1 - $?)) > /logs/verifier/reward.txt',
    )
    server = FakeArt()
    await server.start()
    try:
        async with art.Backend(server.url) as backend:
            model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
            await model.register(backend)
            model.inference_api_key = "secret-key"
            async with art.rollout(model, sampling={"temperature": 0.5}) as r:
                command = f"python3 -c '{AGENT}' && env && echo {{instruction}}"
                trajectory = await harbor.run(harbor.tasks(folder)[0], command, r)
    finally:
        await server.stop()
    asked = [one for one in server.requests if one.path.endswith("/chat/completions")]
    assert [one.path for one in asked] == [f"/s/{r.session_in_requests}/v1/chat/completions"] * 2
    assert {one.headers["authorization"] for one in asked} == {f"Bearer {r.api_key}"} and r.api_key.startswith(
        "secret-key"
    )
    assert asked[0].json()["messages"][0]["content"] == "Do something."
    assert trajectory.reward == 1.0 and trajectory.metrics["agent_exit_code"] == 0
    assert trajectory.metadata == {"task": "task"} and trajectory.messages_and_choices
    (printed,) = trajectory.logs
    assert printed.startswith("the agent printed") and "Do something." in printed and "secret-key" not in printed


@needs_bubblewrap
async def test_without_a_gateway_nothing_answers(tmp_path: Path) -> None:
    probe = "python3 -c 'import socket; print(socket.create_connection((\"127.0.0.1\", 7623)))' 2>&1 | tail -1"
    outcome = await play(harbor.tasks(TASKS / "hello-file")[0], probe)
    assert "ConnectionRefusedError" in outcome.agent_output
