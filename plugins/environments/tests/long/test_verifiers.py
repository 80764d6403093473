"""`VerifiersEnvironment` against the real package in its own environment and a scripted server."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.server import MODEL_INFO, Answer, FakeServer, Request

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python interpreter of .venv-verifiers."""
    subprocess.run([ROOT / "scripts" / "setup-verifiers"], check=True)
    return ROOT / ".venv-verifiers" / "bin" / "python"


@pytest.fixture
def policies(server: FakeServer) -> FakeServer:
    """A server with any model, which says "yes"."""

    def register(request: Request) -> Answer:
        name = request.json()["name"]
        return Answer(body=MODEL_INFO | {"name": name, "inference_name": f"demo/{name}"})

    message = {"role": "assistant", "content": "yes"}
    completion = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
    }
    server.on("POST", "/api/models", register)
    server.on("POST", "/v1/chat/completions", Answer(body=completion))
    server.otherwise = lambda _: Answer(body={"histories": [], "num_choices": 0})
    return server


async def run(python: Path, server: FakeServer, what: str) -> Any:
    program = Path(__file__).with_name("verifiers_program.py")
    process = await asyncio.create_subprocess_exec(
        *(python, program, what),
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "ART_SERVER_URL": server.url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-4000:]
    return json.loads(output.decode().splitlines()[-1])["results"]


async def test_an_episode_without_a_whole_reward_fails(python: Path, policies: FakeServer) -> None:
    results = await run(python, policies, "all")
    assert results.pop("good") == 1.0
    assert results == {
        "setup": "agent 'agent' has no reward: setup_timeout",
        "finalize": "agent 'agent' has no reward: finalize_timeout",
        "scoring": "agent 'agent' has no reward: scoring_timeout, says_yes was not scored",
        "unscored": "agent 'agent' has no reward: style was not scored",
    }


async def test_two_models_with_different_keys_use_their_own(python: Path, policies: FakeServer) -> None:
    assert await run(python, policies, "keys") == []
    asked = policies.sent("POST", "/v1/chat/completions")
    used = {(request.json()["model"], request.headers["authorization"]) for request in asked}
    assert used == {("demo/a", "Bearer key-of-a"), ("demo/b", "Bearer key-of-b")}
