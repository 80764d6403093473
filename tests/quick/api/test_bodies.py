"""Reading bodies: limits, depth, and groups as they arrive."""

import asyncio
import gzip
import hashlib
import itertools
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from art_protocol.wire import LoRAConfig, TrainRequest, TrajectoryGroupBody
from art_server.api import error_responses
from art_server.api.bodies import (
    MAX_DEPTH,
    SMALL_BYTES,
    GroupLines,
    beside,
    decode,
    is_deeper,
    is_large,
    read_body,
    v1_limit_mb,
)
from art_server.errors import InvalidInput, TooLarge
from art_server.jobs.train_requests import NewJob
from art_server.store.base_models import TINY_DIR, BaseModel
from tests.asgi_client import client
from tests.quick.api.idle_server import DONE, choice, follow_with, make
from tests.refusals import refused

# --- limits ---


def test_a_body_that_tells_its_length_is_refused_before_it_is_read() -> None:
    app = FastAPI()
    error_responses.add_error_handlers(app)
    sent = 0

    @app.post("/")
    async def take(request: Request) -> int:
        return len(await read_body(request, 0.5, "send less"))

    async def post(size: int, headers: dict[str, str]) -> httpx.Response:
        async def parts() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(size // 1024):
                sent += 1024
                yield b"x" * 1024

        async with client(app) as http:
            return await http.post("/", content=parts(), headers=headers)

    assert asyncio.run(post(512 * 1024, {})).json() == 512 * 1024
    for headers, most in (({}, 513 * 1024), ({"content-length": str(2**20)}, 0)):
        sent = 0
        refused = asyncio.run(post(2**20, headers))
        assert refused.status_code == 413 and "above 0.5 MB: send less" in refused.text
        assert sent <= most


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "is_other_base", "status"),
    [("/api/models/p/none/train", False, 404), ("/api/models/p/run/train", True, 409)],
)
async def test_a_train_request_that_its_path_refuses_is_not_read(
    path: str, is_other_base: bool, status: int, tmp_path: Path
) -> None:
    app, server = make(tmp_path)
    if is_other_base:
        server.fleet.base = BaseModel("another", TINY_DIR)
    sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1024):
            sent += 1024
            yield b"x" * 1024

    async with client(app) as http:
        assert (await http.post(path, content=parts())).status_code == status
    assert sent == 0


def test_requests_for_inference_are_bounded_by_the_context() -> None:
    assert v1_limit_mb(None) == 4.0
    assert v1_limit_mb(8192) == 4.5
    assert v1_limit_mb(131_072) == 12.0


@pytest.mark.anyio
async def test_a_request_above_the_context_s_limit_is_refused(tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    message = {"role": "user", "content": "x" * 6 * 2**20}
    async with client(app) as http:
        body = {"model": "run", "messages": [message]}
        response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 413 and "--max-seq-length" in response.text


@pytest.mark.anyio
async def test_large_bodies_are_parsed_beside_the_event_loop() -> None:
    threads = [await beside(is_large(b"x" * size), threading.get_ident) for size in (SMALL_BYTES, SMALL_BYTES + 1)]
    assert threads[0] == threading.get_ident() != threads[1]


# --- depth ---


@given(st.integers(0, 40), st.integers(0, 40))
def test_depth_counts_objects_and_arrays(depth: int, limit: int) -> None:
    value: Any = 1
    for level in range(depth):
        value = {"a": value, "b": 1} if level % 2 else [1, value]
    assert is_deeper(value, limit) == (depth > limit)


def deep(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_json_nests_up_to_a_limit() -> None:
    decode(deep(MAX_DEPTH))
    for body in (deep(MAX_DEPTH + 1), deep(100_000), b'{"a":' * 100_000):
        with refused(InvalidInput, "too_deep"):
            decode(body)
    for body in (b"", b"{", b"nonsense", b'"\xff"', b'{"a": "\xed\xa0\x80"}'):
        with refused(InvalidInput, "invalid_body"):
            decode(body)
    assert decode(b'{"a": "' + b"[" * 1000 + b'"}') == {"a": "[" * 1000}


ROUTES = {
    "/v1/chat/completions": b'{"model": "run", "messages": %s}',
    "/v1/completions": b'{"model": "run", "prompt": %s}',
    "/v1/responses": b'{"model": "run", "input": "a", "metadata": %s}',
    "/v1/messages": b'{"model": "run", "messages": [], "metadata": %s}',
    "/v1/messages/count_tokens": b'{"model": "run", "messages": [], "metadata": %s}',
    "/api/models": b'{"name": "a", "project": "p", "base_model": "b", "lora": %s}',
    "/api/models/p/run/train": b'{"groups": [{"trajectories": [{"messages_and_choices": [{"a": %s}], "reward": 1}]}]}',
    "/api/models/p/run/log": b'{"groups": [], "metrics": %s}',
    "/api/models/p/run/checkpoints/delete": b'{"keep": %s}',
    "/register": b'{"name": "run", "project": "p", "config": %s}',
    "/_train_model": b'{"model": {"name": "run", "project": "p"}, "trajectory_groups": [{"a": %s}]}',
    "/_log": b'{"model": {"name": "run", "project": "p"}, "x": %s}',
}


@pytest.mark.anyio
@pytest.mark.parametrize("depth", [300, 990, 100_000])
async def test_a_deep_body_is_refused_by_every_route(tmp_path: Path, depth: int) -> None:
    app, _ = make(tmp_path)
    async with client(app) as http:
        for path, body in ROUTES.items():
            response = await http.post(path, content=body % deep(depth))
            if path == "/_train_model":  # its clients show the text of a stream only
                assert "error" in response.json(), response.text
            else:
                assert response.status_code in (400, 422), (path, response.text)
            assert len(response.content) < 1000


@pytest.mark.anyio
async def test_deep_json_in_a_text_is_refused(tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    function = {"name": "f", "arguments": deep(100_000).decode()}
    message = {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}
    async with client(app) as http:
        body = {"model": "run", "messages": [message]}
        response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 422 and response.json()["error"]["code"] == "too_deep"


# --- groups, a line each ---


def group(reward: float, *entries: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}, *entries]
    return {"trajectories": [{"messages_and_choices": messages, "reward": reward}]}


def ndjson(*lines: Any) -> bytes:
    return b"\n".join(json.dumps(line).encode() for line in lines)


def lines_of(parts: list[bytes], max_mb: float = 1.0) -> GroupLines:
    """The body that arrives in these parts, and is cut off behind the last one if that is empty."""
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    if parts and not parts[-1]:
        messages[-2:] = [{"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    return GroupLines(Request({"type": "http", "headers": []}, receive), max_mb)


async def read(lines: GroupLines) -> tuple[TrainRequest, list[TrajectoryGroupBody]]:
    request = await lines.fields(TrainRequest)
    return request, [parsed async for parsed in lines.groups()]


@given(st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_a_body_is_read_alike_however_it_arrives(cuts: list[int], has_end: bool) -> None:
    body = ndjson({"expected_step": 3, "groups": [group(0.0)]}, group(1.0), group(2.0))
    body += b"\n\n" if has_end else b""
    bounds = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    parts = [body[a:b] for a, b in itertools.pairwise(bounds)]

    async def check() -> None:
        lines = lines_of(parts)
        request, groups = await read(lines)
        assert request.expected_step == 3
        assert [parsed.trajectories[0].reward for parsed in groups] == [0.0, 1.0, 2.0]
        assert await lines.digest() == hashlib.sha256(body).hexdigest()

    asyncio.run(check())


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("parts", "code", "param", "line"),
    [
        ([], "invalid_body", None, 1),
        ([b"nonsense\n"], "invalid_body", None, 1),
        ([ndjson({}, group(1.0), group(1.0) | {"a": 1})], "invalid_body", "groups[1].a", 3),
        ([ndjson({"groups": [group(1.0)]}), b"\n\n{"], "invalid_body", "groups[1]", 3),
        (
            [ndjson({}, group(1.0), {"trajectories": [{"reward": "high"}]})],
            *("invalid_body", "groups[1].trajectories[0].messages_and_choices", 3),
        ),
        ([b"{}\n" + b"[" * 100_000], "invalid_body", "groups[0]", 2),
        ([ndjson({}, group(1.0)), b""], "body_cut", None, 2),
    ],
)
async def test_an_error_names_the_line_and_the_field(
    parts: list[bytes], code: str, param: str | None, line: int
) -> None:
    with pytest.raises(InvalidInput) as error:
        await read(lines_of(parts))
    assert (error.value.code, error.value.param) == (code, param)
    assert f"line {line}" in error.value.message


@pytest.mark.anyio
async def test_a_body_of_many_lines_is_bounded_as_a_whole() -> None:
    with pytest.raises(TooLarge):
        await read(lines_of([ndjson({}), *([b"\n" + ndjson(group(1.0))] * 100)], max_mb=0.001))


# --- train requests ---

TRAIN = "/api/models/p/run/train"


class Body:
    """A body of which a test sends one part after the other."""

    def __init__(self) -> None:
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, part: bytes | None) -> None:
        self._parts.put_nowait(part)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (part := await self._parts.get()) is not None:
            yield part


@pytest.mark.anyio
async def test_a_group_is_resolved_as_it_arrives_and_the_job_waits_for_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, server = make(tmp_path)
    follow_with(server, DONE)
    resolved: asyncio.Queue[str] = asyncio.Queue()
    resolve = NewJob.resolve_turns

    async def noted(self: NewJob, body: TrajectoryGroupBody) -> None:
        await resolve(self, body)
        assert not server.queue.waiting()
        resolved.put_nowait("one")

    monkeypatch.setattr(NewJob, "resolve_turns", noted)
    body = Body()
    async with client(app) as http:
        posting = asyncio.create_task(http.post(TRAIN, content=body))
        body.send(b"{}\n")
        for reward in range(3):
            body.send(ndjson(group(reward, choice(5 + reward))) + b"\n")
            assert await resolved.get() == "one"
        body.send(None)
        response = await posting
    job = server.queue.get(server.queue.waiting()[0].job_id)
    assert response.status_code == 200
    assert (job.report.num_groups, job.report.turns) == (3, {"ids": 3})
    assert job.metrics["train/reward"] == 1.0
    rows = gzip.decompress(server.queue.trajectories(job.job_id)).splitlines()
    assert [json.loads(row)["trajectories"][0]["reward"] for row in rows] == [0.0, 1.0, 2.0]


@pytest.mark.anyio
async def test_nothing_is_kept_of_a_request_that_breaks_off(tmp_path: Path) -> None:
    app, server = make(tmp_path)
    whole = ndjson({}, group(0.0, choice(5)), group(1.0, choice(6)))
    async with client(app) as http:
        broken = await http.post(TRAIN, content=whole[:-20], headers={"idempotency-key": "k"})
        assert (broken.status_code, broken.json()["error"]["param"]) == (422, "groups[1]")
        assert not server.queue.waiting()
        follow_with(server, DONE)
        again = await http.post(TRAIN, content=whole, headers={"idempotency-key": "k"})
    job = server.queue.get(server.queue.waiting()[0].job_id)
    assert again.status_code == 200 and job.report.num_groups == 2


@pytest.mark.anyio
async def test_a_repeated_request_gets_its_job_and_another_body_is_refused(tmp_path: Path) -> None:
    app, server = make(tmp_path)
    follow_with(server, DONE)
    body = ndjson({}, group(0.0, choice(5)), group(1.0, choice(6)))
    key = {"idempotency-key": "k"}
    first = {**key, "x-art-request-digest": hashlib.sha256(body).hexdigest()}
    async with client(app) as http:
        for headers, sent in ((key, body), (key, body), (first, b"{}")):
            assert (await http.post(TRAIN, content=sent, headers=headers)).status_code == 200
        other = await http.post(TRAIN, content=body + b"\n", headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "key_reused")
    assert len(server.queue.jobs(None, ("queued",), 10)) == 1


@pytest.mark.anyio
async def test_a_list_of_rates_is_compared_with_the_number_of_groups(tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    config = {"learning_rate": [1e-5, 1e-6], "batch_size": 1}
    body = ndjson({"config": config}, *(group(number, choice(number)) for number in range(4)))
    async with client(app) as http:
        answer = await http.post(TRAIN, content=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "config.learning_rate")


# --- small bodies ---


@pytest.mark.anyio
@pytest.mark.parametrize("declared", [True, False])
async def test_a_json_body_above_four_megabytes_is_refused(declared: bool, tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    body = json.dumps({"name": "a", "project": "p", "base_model": "x" * 5 * 2**20}).encode()

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 2**16):
            yield body[start : start + 2**16]

    async with client(app) as http:
        headers = {"content-type": "application/json"}
        content = body if declared else parts()
        answer = await http.post("/api/models", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.anyio
async def test_a_json_body_of_another_type_gets_the_header_to_send(tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    model = {"name": "run", "project": "p", "base_model": "art/tiny"}
    async with client(app) as http:
        form = await http.post("/api/models", data=model)
        assert (await http.post("/api/models", content=json.dumps(model))).status_code == 200
    error = form.json()["error"]
    assert (form.status_code, error["code"]) == (422, "invalid_body")
    assert "content-type" in error["message"]


@pytest.mark.parametrize("alpha", ["0", "-1", "NaN", "Infinity", "1e999", "65537"])
def test_an_adapters_alpha_is_a_number_that_a_policy_survives(alpha: str) -> None:
    with pytest.raises(ValidationError, match="alpha"):
        LoRAConfig.model_validate_json(f'{{"alpha": {alpha}}}')
