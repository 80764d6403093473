import asyncio
import gc
import logging
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import Any, cast

import openai
import pytest

import art

pytestmark = pytest.mark.anyio

COMPLETION = {
    "id": "cmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "demo/agent@3",
    "prompt_token_ids": [1, 2, 3],
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "yes"},
            "logprobs": None,
            "token_ids": [4, 5],
            "art": {"id": "cmpl-1", "step": 3},
        }
    ],
}
MESSAGES: Any = [{"role": "user", "content": "hi"}]
PATH = "/v1/chat/completions"


@pytest.fixture
def client(server, answer, model: art.TrainableModel) -> openai.AsyncOpenAI:
    server.on("POST", PATH, answer(body=COMPLETION))
    return model.openai_client()


async def test_a_choice_with_tokens_is_self_contained(client: openai.AsyncOpenAI):
    completion = await client.chat.completions.create(model="agent", messages=MESSAGES, logprobs=True)
    trajectory = art.Trajectory(messages_and_choices=[completion.choices[0]])
    (dumped,) = trajectory.model_dump(mode="json")["messages_and_choices"]
    assert dumped == {**COMPLETION["choices"][0], "prompt_token_ids": [1, 2, 3]}


async def test_no_log_has_the_key(server, client: openai.AsyncOpenAI, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    copied = client.with_options(api_key="sk-very-secret", max_retries=0)
    await copied.chat.completions.create(model="agent", messages=MESSAGES)
    assert server.sent("POST", PATH)[-1].headers["authorization"] == "Bearer sk-very-secret"
    await server.stop()
    with pytest.raises(openai.APIConnectionError):
        await copied.chat.completions.create(model="agent", messages=MESSAGES)
    assert "openai" in {record.name.partition(".")[0] for record in caplog.records}
    assert "sk-very-secret" not in caplog.text


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({}, {}),
        ({"logprobs": True}, {"logprobs": True}),
        ({"extra_body": {"return_token_ids": True}}, {"return_token_ids": True}),
    ],
)
async def test_tokens_are_asked_for_only_by_the_program(server, client: openai.AsyncOpenAI, asked: dict, sent: dict):
    for copied in (client, client.with_options(timeout=5)):
        await copied.chat.completions.create(model="agent", messages=MESSAGES, **asked)
        body = server.sent("POST", PATH)[-1].json()
        assert body == {"model": "agent", "messages": MESSAGES, **sent}


async def test_answers_without_tokens_are_choices_that_name_their_record(server, answer, client: openai.AsyncOpenAI):
    mark = {"id": "cmpl-1", "step": 3, "num_tokens": 2}
    bare = {**COMPLETION["choices"][0], "token_ids": None, "art": mark}
    server.on("POST", PATH, answer(body={**COMPLETION, "prompt_token_ids": None, "choices": [bare]}))
    completion = await client.chat.completions.create(model="agent", messages=MESSAGES)
    trajectory = art.Trajectory(messages_and_choices=[completion.choices[0]])
    (dumped,) = trajectory.model_dump(mode="json")["messages_and_choices"]
    assert dumped == bare
    assert trajectory.num_sampled_tokens() == 2


async def test_key_and_patience_of_the_client(server, answer):
    async with art.Backend(f"{server.url}/v1/", "secret") as backend:
        model = art.TrainableModel(name="agent", project="demo", base_model="art/tiny")
        await model.register(backend)
        client = model.openai_client()
        server.on("POST", PATH, answer(body=COMPLETION))
        await client.chat.completions.create(model=model.name, messages=MESSAGES)
    assert server.sent("POST", PATH)[0].headers["authorization"] == "Bearer secret"
    timeout = cast(openai.Timeout, client.timeout)
    assert (timeout.read, timeout.connect, client.max_retries) == (1200, 10, 10)
    assert client.is_closed()


async def test_plain_model_gets_a_plain_client(server, answer):
    server.on("POST", PATH, answer(body=COMPLETION))
    judge = art.Model(name="judge", project="demo", inference_base_url=f"{server.url}/v1")
    await judge.openai_client().chat.completions.create(model="judge", messages=MESSAGES)
    request = server.sent("POST", PATH)[0]
    assert "logprobs" not in request.json()
    assert request.headers["authorization"] == "Bearer default"
    await judge.close()


async def test_request_survives_a_restart_of_the_server(server, client: openai.AsyncOpenAI):
    await client.chat.completions.create(model="agent", messages=MESSAGES)
    await server.stop()
    await server.start()
    await client.chat.completions.create(model="agent", messages=MESSAGES)


PROGRAM = """
import asyncio, gc, sys
import art

models = [art.Model(name="agent", project="demo", inference_base_url=sys.argv[1], inference_api_key="key")]

async def ask():
    await models[0].openai_client().chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])

async def forget():
    models.clear()
    gc.collect()
    await asyncio.sleep(0.1)

asyncio.run(ask())
asyncio.run(forget())
"""


async def test_a_client_of_a_loop_that_has_ended_is_collected_in_silence(server: Any, answer: Any) -> None:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    server.on("POST", "/v1/chat/completions", answer(body={"id": "c", "choices": [choice]}))
    command = [sys.executable, "-c", PROGRAM, f"{server.url}/v1"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(server.sent("POST", "/v1/chat/completions")) == 1


async def test_a_client_that_is_collected_stops_the_reading_of_no_other_socket(server: Any, answer: Any) -> None:
    """Sockets that are opened then may get the numbers of the client's. A program that made a teacher for each step hung."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    server.on("POST", "/v1/chat/completions", answer(body={"id": "c", "choices": [choice]}))
    model = art.Model(name="m", project="p", inference_base_url=f"{server.url}/v1", inference_api_key="key")
    await model.openai_client().chat.completions.create(model="m", messages=MESSAGES)
    loop = asyncio.get_running_loop()
    del model
    gc.collect()
    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for _ in range(3) for one in socket.socketpair()]
        for opened in sockets:
            loop.add_reader(opened, print)
        await asyncio.sleep(0.1)
        assert all(loop.remove_reader(opened) for opened in sockets)
