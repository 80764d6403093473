"""A server, and a file that trains on it."""

import json
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plugins.finetune.tests.policy_server import PolicyServer
from tests.makers.finetune_file import enter, finetune_file
from tests.quick.conftest import no_certificates  # noqa: F401

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


@pytest.fixture(scope="module", autouse=True)
def no_plots() -> Iterator[None]:
    """A plot takes longer than the run that it shows. Runs that are processes of their own draw real ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("art.finetune.plot.draw", lambda state: b"a plot")
        yield


@pytest.fixture
async def policy() -> AsyncIterator[PolicyServer]:
    fake = PolicyServer()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with an agent and four rows. Modules of the folder are forgotten with the folder."""
    enter(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the folder's modules are found in this test only
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"id": f"row {number}", "question": f"question {number}", "answer": "yes"} for number in range(4)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def make_file(policy: PolicyServer, folder: Path) -> Callable[..., dict[str, Any]]:
    """Makes a file; `changes` replace values, and `code` is added to the agent's module."""

    def make(code: str = "", **changes: Any) -> dict[str, Any]:
        with (folder / "agent.py").open("a") as file:
            file.write(textwrap.dedent(code))
        return finetune_file({"url": policy.url}, **changes)

    return make
