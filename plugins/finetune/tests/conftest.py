"""A server, and a file that trains on it."""

import json
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from plugins.finetune.tests.policy_server import PolicyServer

AGENT = """
import os
from openai import AsyncOpenAI

async def answer(question):
    messages = [{"role": "user", "content": question}]
    async with AsyncOpenAI() as client:
        completion = await client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    return completion.choices[0].message.content

def score(row, output):
    return float(output == row["answer"])
"""


@pytest.fixture
async def policy() -> AsyncIterator[PolicyServer]:
    fake = PolicyServer()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with an agent and four rows."""
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "ART_SERVER_URL"):
        monkeypatch.setenv(name, "")  # so that it is as before when the test ends
        monkeypatch.delenv(name)
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"id": f"row {number}", "question": f"question {number}", "answer": "yes"} for number in range(4)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return tmp_path


@pytest.fixture
def make_file(policy: PolicyServer, folder: Path) -> Callable[..., dict[str, Any]]:
    """Makes a file; `changes` replace values by dotted name, and `code` is added to the agent's module."""

    def make(code: str = "", **changes: Any) -> dict[str, Any]:
        with (folder / "agent.py").open("a") as file:
            file.write(textwrap.dedent(code))
        tree: dict[str, Any] = {
            "workflow": {"_type": "agent.py:answer"},
            "eval": {
                "general": {"dataset": {"_type": "json", "file_path": "rows.json"}},
                "evaluators": {"reward": {"_type": "agent.py:score"}},
            },
            "trajectory_builders": {"b": {"_type": "openpipe_art_traj_builder", "num_generations": 2}},
            "trainer_adapters": {
                "a": {
                    "_type": "openpipe_art_trainer_adapter",
                    "backend": {"url": policy.url, "name": "agent", "project": "demo", "base_model": "art/tiny"},
                }
            },
            "trainers": {"t": {"_type": "openpipe_art_trainer"}},
            "finetuning": {
                "enabled": True,
                "trainer": "t",
                "trajectory_builder": "b",
                "trainer_adapter": "a",
                "reward_function": {"name": "reward"},
                "num_epochs": 2,
                "output_dir": "out",
            },
        }
        for name, value in changes.items():
            *path, last = name.split("__")
            inner = tree
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return tree

    return make
