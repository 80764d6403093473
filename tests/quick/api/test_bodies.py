"""Reading bodies: limits, depth, and trajectories one by one."""

import asyncio
import functools
import gc
import json
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI, Request
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from art_protocol.wire import LogRequest, LoRAConfig, TrainRequest
from art_server.api import errors
from art_server.api.bodies import (
    MAX_DEPTH,
    SMALL_BYTES,
    GroupBodies,
    beside,
    decode,
    is_deeper,
    read_body,
    read_groups,
    v1_limit_mb,
)
from art_server.base_models import TINY_DIR, BaseModel
from art_server.errors import InvalidInput
from tests.quick.api.test_art_wire import client, make


def test_a_body_that_tells_its_length_is_refused_before_it_is_read() -> None:
    app = FastAPI()
    errors.install(app)
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

        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
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
    app, service = make(tmp_path)
    if is_other_base:
        service._processes.engine.base = BaseModel("another", TINY_DIR)
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
async def test_a_request_above_the_context_s_limit_is_told_so(tmp_path: Path) -> None:
    app, _ = make(tmp_path)
    message = {"role": "user", "content": "x" * 6 * 2**20}
    async with client(app) as http:
        body = {"model": "run", "messages": [message]}
        response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 413 and "--max-seq-length" in response.text


@pytest.mark.anyio
async def test_large_bodies_are_parsed_beside_the_event_loop() -> None:
    threads = [
        await beside(lambda _: threading.get_ident(), b"x" * size)
        for size in (SMALL_BYTES, SMALL_BYTES + 1)
    ]
    assert threads[0] == threading.get_ident() != threads[1]


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
        with pytest.raises(InvalidInput, match="nested too deeply"):
            decode(body)
    for body in (b"", b"{", b"nonsense", b'"\xff"', b'{"a": "\xed\xa0\x80"}'):
        with pytest.raises(InvalidInput, match="not JSON"):
            decode(body)
    assert decode(b'{"a": "' + b"[" * 1000 + b'"}') == {"a": "[" * 1000}


ROUTES = {
    "/v1/chat/completions": b'{"model": "run", "messages": %s}',
    "/v1/completions": b'{"model": "run", "prompt": %s}',
    "/v1/responses": b'{"model": "run", "input": "a", "metadata": %s}',
    "/v1/messages": b'{"model": "run", "messages": [], "metadata": %s}',
    "/api/models": b'{"name": "a", "project": "p", "base_model": "b", "lora": %s}',
    "/api/models/p/run/train": b'{"groups": [{"trajectories": [{"messages_and_choices": '
    b'[{"a": %s}], "reward": 1}]}]}',
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
                assert response.status_code == 422, (path, response.text)
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


ANYTHING = st.none() | st.booleans() | st.floats(-1, 1) | st.sampled_from(["1", "x", [], {}])


def often(right: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 19).flatmap(lambda dice: right if dice else ANYTHING)


def record(
    required: dict[str, st.SearchStrategy[Any]], **optional: st.SearchStrategy[Any]
) -> st.SearchStrategy[Any]:
    """A record that mostly fits; now and then a field is wrong, missing or unknown."""
    spoilt = {key: often(value) for key, value in required.items()}
    more = {key: often(value) for key, value in optional.items()}
    right = st.fixed_dictionaries(spoilt, optional=more)
    wrong = st.fixed_dictionaries({}, optional=spoilt | more | {"surplus": ANYTHING})
    return st.integers(0, 19).flatmap(lambda dice: right if dice else wrong)


MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content"]), ANYTHING), max_size=2)


TRAJECTORY = record(
    {"messages_and_choices": MESSAGES, "reward": st.floats(-1, 1) | st.integers(-1, 1)},
    metrics=st.dictionaries(st.text(max_size=2), st.floats(-1, 1), max_size=2),
    additional_histories=st.lists(record({"messages_and_choices": MESSAGES}), max_size=2),
    logs=st.lists(st.text(max_size=2), max_size=2),
)


FAILURE = record({"type": st.just("E"), "message": st.text(max_size=2)})


GROUP = record(
    {"trajectories": st.lists(often(TRAJECTORY), max_size=3)},
    exceptions=st.lists(often(FAILURE), max_size=2),
    metadata=st.dictionaries(st.text(max_size=2), ANYTHING, max_size=2),
)


GROUPS = {"groups": st.lists(often(GROUP), max_size=3)}


REQUEST = {
    TrainRequest: record(GROUPS, config=record({}, learning_rate=st.floats(1e-6, 1))),
    LogRequest: record(GROUPS, split=st.sampled_from(["val", "a"])),
}


def outcome(read: Any, body: bytes, kind: Any) -> Any:
    """A request, or what is wrong with it."""
    try:
        return read(body, kind)
    except ValidationError as error:
        made = errors.invalid_body(error)
    except InvalidInput as error:
        made = error
    return made.message, made.code, made.param


@pytest.mark.parametrize("kind", [TrainRequest, LogRequest])
def test_a_request_read_in_pieces_is_the_same_and_has_the_same_errors(kind: Any) -> None:
    seen: set[str] = set()

    @settings(max_examples=300, deadline=None)
    @given(REQUEST[kind])
    def check(value: Any) -> None:
        body = json.dumps(value).encode()
        whole = outcome(lambda text, kind: kind.model_validate_json(text), body, kind)
        pieces = outcome(read_groups, body, kind)
        assert pieces == whole
        if isinstance(whole, kind):
            assert pieces.model_dump_json() == whole.model_dump_json()
            assert pieces.model_fields_set == whole.model_fields_set
            seen.add("a trajectory" if any(group.trajectories for group in whole.groups) else "")
        else:
            seen.add(re.sub("[0-9]", "0", str(whole[2])))

    check()
    assert {"a trajectory", "groups[0]", "groups[0].trajectories[0].reward"} <= seen


def test_checks_of_the_whole_request_see_the_number_of_groups() -> None:
    groups = [{"trajectories": [{"messages_and_choices": [], "reward": 1.0}]}] * 4
    config = {"learning_rate": [1e-5, 1e-6], "batch_size": 1}
    body = json.dumps({"groups": groups, "config": config}).encode()
    made = outcome(read_groups, body, TrainRequest)
    assert made == outcome(lambda text, kind: kind.model_validate_json(text), body, TrainRequest)
    assert "2 rates, and the job takes 4 optimizer steps" in made[0]


def test_errors_name_the_place_in_the_whole_body() -> None:
    good = {"messages_and_choices": [], "reward": 1.0}
    groups = [{"trajectories": [good, good, good | {"reward": "high"}]}]
    with pytest.raises(InvalidInput) as error:
        read_groups(json.dumps({"groups": groups}).encode(), TrainRequest)
    assert error.value.param == "groups[0].trajectories[2].reward"
    for body in (b"", b'{"groups": [', b'{"groups": [NaN]}', b"\xff", deep(100_000)):
        with pytest.raises(InvalidInput):
            read_groups(body, TrainRequest)


def large_body(megabytes: int) -> bytes:
    """Of trajectories as OpenAI's clients send them back, an entry of log-probabilities a token."""
    entry = {"token": "token_id:517", "bytes": [111, 107], "logprob": -0.251234, "top_logprobs": []}
    choice = {
        "finish_reason": "stop",
        "index": 0,
        "message": {"role": "assistant", "content": "ok " * 1000},
        "logprobs": {"content": [entry] * 1000, "refusal": None},
    }
    messages = [{"role": "user", "content": "hi"}, choice]
    one = msgspec.json.encode({"messages_and_choices": messages, "reward": 0.5})
    group = b'{"trajectories": [' + b", ".join([one] * 8) + b"]}"
    number = megabytes * 10**6 // len(group)
    return b'{"groups": [' + b", ".join([group] * number) + b"]}"


@pytest.mark.anyio
async def test_what_a_request_was_used_for_is_returned_and_nothing_stays_frozen() -> None:
    bodies = GroupBodies()
    body = large_body(1)
    assert len(body) > SMALL_BYTES
    held = gc.get_freeze_count()

    async def use(request: TrainRequest) -> int:
        assert gc.get_freeze_count() > held
        return len(request.groups)

    parse = functools.partial(read_groups, kind=TrainRequest)
    assert await bodies.read(body, parse, use) == body.count(b"trajectories")
    with pytest.raises(InvalidInput):
        await bodies.read(body[:-1], parse, use)
    assert gc.get_freeze_count() <= held and gc.isenabled()


@pytest.mark.parametrize("alpha", ["0", "-1", "NaN", "Infinity", "1e999", "65537"])
def test_an_adapters_alpha_is_a_number_that_a_policy_survives(alpha: str) -> None:
    with pytest.raises(ValidationError, match="alpha"):
        LoRAConfig.model_validate_json(f'{{"alpha": {alpha}}}')
