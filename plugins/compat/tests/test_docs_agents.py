"""The Python of docs/agents.md runs as it stands, against a server that samples nothing."""

import ast
import asyncio
import os
import re
import shutil
import signal
from collections.abc import Awaitable
from pathlib import Path
from subprocess import PIPE
from typing import Any, cast

import openai
import psutil
import pytest

import art
from art_server.settings import ApiKey
from tests.processes import wait_until_gone
from tests.quick.client.conftest import Answer
from tests.quick.server.served import serving
from tests.waiting import until

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
SCRIPT = re.findall(r"```bash\n(# agent\.sh.*?)```", PAGE.read_text(), re.DOTALL)[0]
HAS_PROGRAMS = shutil.which("jq") is not None and shutil.which("curl") is not None
NEEDS_PROGRAMS = pytest.mark.skipif(not HAS_PROGRAMS, reason="curl or jq is not installed")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


async def ask(model: art.TrainableModel, question: str) -> str | None:
    return await answer_of(model.openai_client(), question)


async def answer_of(client: openai.AsyncOpenAI, question: str) -> str | None:
    messages: Any = [{"role": "user", "content": question}]
    completion = await client.chat.completions.create(model="agent", messages=messages)
    return completion.choices[0].message.content


async def play(item: str, first: openai.AsyncOpenAI, second: openai.AsyncOpenAI) -> str:
    return "first" if await answer_of(first, item) == await answer_of(second, item) else "none"


@pytest.fixture
async def names(
    server, answer, backend: art.Backend, model: art.TrainableModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What the snippets take for granted."""
    (tmp_path / "agent.sh").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    question, INFER_KEY, items = "What is 2 plus 3?", "infer", ["an apple", "a pear"]
    message = {"role": "assistant", "content": "yes"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    completion = {"id": "c", "object": "chat.completion", "choices": [choice]}
    history = {"messages_and_choices": [{"role": "user", "content": "hi"}, choice]}
    reply = {"histories": [history], "num_choices": 1}

    done = {"event": "done", "job_id": "j", "step": 1, "metrics": {"loss/train": 0.5}}

    def otherwise(request: Any) -> Any:
        if request.path.endswith("/train"):
            return answer(lines=[done])
        return answer(body=reply if "/sessions/" in request.path else completion)

    server.otherwise = otherwise
    opponent = art.TrainableModel(name="opponent", project="demo", base_model="art/tiny")
    await opponent.register(backend)

    async def run_agent(question: str, *, model: str, base_url="", api_key="default") -> str:
        base_url = base_url or f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            return await answer_of(client, question) or ""

    def score(answer: str) -> float:
        return float(answer == "yes")

    modules = {"asyncio": asyncio, "os": os, "signal": signal, "PIPE": PIPE}
    return {**globals(), **locals(), **modules}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
async def test_snippet_runs(names: dict[str, Any], snippet: str):
    if "agent.sh" in snippet and not HAS_PROGRAMS:
        pytest.skip("curl or jq is not installed")
    code = compile(snippet, str(PAGE), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result: Any = eval(code, names)
    if result is not None:
        await result
    if "rollout" in names and callable(names["rollout"]):
        played = names["rollout"](names["model"], "What is 2 plus 3?")
        names["trajectory"] = await cast(Awaitable[object], played)
    trajectories = [value for value in names.values() if isinstance(value, art.Trajectory)]
    trajectories += [trajectory for pair in names.get("pairs", ()) for trajectory in pair]
    assert trajectories and all(len(trajectory.messages_and_choices) == 2 for trajectory in trajectories)


async def run_script(folder: Path, **environment: str) -> tuple[int | None, str, str]:
    """The script's exit status, stdout and stderr."""
    (folder / "agent.sh").write_text(SCRIPT.replace("sleep 3", "sleep 0.01"))
    process = await asyncio.create_subprocess_exec(
        "bash", "agent.sh", "hi", cwd=folder, env=os.environ | environment, stdout=PIPE, stderr=PIPE
    )
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


@NEEDS_PROGRAMS
async def test_shell_script_ends_with_the_words_of_the_server(tmp_path: Path):
    async with serving(tmp_path / "server", api_keys=(ApiKey(key="right"),)) as served:
        async with art.Backend(served.url, "right") as backend:
            await art.TrainableModel(name="agent", project="demo", base_model="art/tiny").register(backend)
        url = f"{served.url}/s/s1/v1"
        assert (await run_script(tmp_path, ART_URL=url, ART_MODEL="demo/agent", ART_KEY="right"))[0] == 0
        for model, key, words in (("demo/agent", "wrong", "unknown API key"), ("demo/other", "right", "demo/other")):
            status, output, errors = await run_script(tmp_path, ART_URL=url, ART_MODEL=model, ART_KEY=key)
            assert (status, output) == (1, "") and words in errors and errors.count("\n") == 1


@NEEDS_PROGRAMS
async def test_shell_script_waits_for_a_restart(server, answer, tmp_path: Path):
    again = {"error": {"message": "the engine starts", "retryable": True}}
    completion = {"choices": [{"message": {"role": "assistant", "content": "yes"}}]}
    answers = iter([answer(hang_up=True), answer(503, again), answer(body=completion)])
    server.on("POST", "/v1/chat/completions", lambda _: next(answers))
    environment = {"ART_URL": f"{server.url}/v1", "ART_MODEL": "demo/agent", "ART_KEY": "default"}
    assert (await run_script(tmp_path, **environment))[:2] == (0, "yes\n")


@NEEDS_PROGRAMS
async def test_a_cancelled_rollout_ends_its_script(names: dict[str, Any], server):
    is_over = asyncio.Event()
    server.otherwise = lambda _: Answer(after=is_over)
    (snippet,) = (snippet for snippet in SNIPPETS if "agent.sh" in snippet)
    result: Any = eval(compile(snippet, str(PAGE), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    running = asyncio.create_task(result)
    await until(lambda: any("/chat/completions" in request.path for request in server.requests))
    programs = {program.pid for program in psutil.Process(names["process"].pid).children()} | {names["process"].pid}
    assert len(programs) > 1, "the script's curl runs"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    wait_until_gone(programs)
    is_over.set()
