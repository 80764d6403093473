"""The Python of docs/agents.md runs as it stands, against a server that samples nothing."""

import ast
import asyncio
import os
import re
import shutil
from collections.abc import Awaitable
from pathlib import Path
from subprocess import PIPE
from typing import Any, cast

import openai
import pytest

import art

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"
SCRIPT = re.findall(r"```bash\n(# agent\.sh.*?)```", PAGE.read_text(), re.DOTALL)[0]
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

    modules = {"asyncio": asyncio, "os": os, "PIPE": PIPE}
    return {**globals(), **locals(), **modules}


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
async def test_snippet_runs(names: dict[str, Any], snippet: str):
    if "agent.sh" in snippet and not (shutil.which("jq") and shutil.which("curl")):
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
