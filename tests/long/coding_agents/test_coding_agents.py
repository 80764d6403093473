"""Coding agents as their makers publish them work and train through a rollout's URL and key.

The policy is scripted (`scripted_proxy.py`): what is shown is the way of requests and tokens, not what a small model can do. Each run
writes its agent's row of docs/coding-agents.jsonl, and the table of docs/howto/coding-agents.md.

    .venv/bin/pytest tests/long/coding_agents -k pi
    ART_TEST_FULL=1 .venv/bin/pytest tests/long/coding_agents -k "claude-code or qwen-code"
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import art
from tests.live import Server
from tests.long.coding_agents.agents import AGENTS, TASK, Agent
from tests.long.coding_agents.long_tiny import FLAGS, make_long_tiny
from tests.long.coding_agents.rollouts import Ran, count_tokens, roll_out, row_of
from tests.long.coding_agents.scripted_proxy import ScriptedProxy
from tests.long.coding_agents.table import write_row
from tests.pages import run

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(2 * 3600)]

SIDE_CALLS = {"opencode": 1}
"""Requests without tools in a rollout. The base model answers them, so they are not trained."""
RENDERS_ANEW = {"aider"}
"""Agents whose later requests do not continue the earlier ones: aider moves the files of the chat."""

LONG = {"claude-code", "qwen-code"}
"""Agents with prompts of more than 35,000 tokens, on which two busy cores train for ten minutes: only with ART_TEST_FULL=1."""


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("agents")
    make_long_tiny(folder / "tiny-long")
    server = Server(folder)
    server.arguments = ["--base-model", str(folder / "tiny-long"), "--exact", *FLAGS]
    with server.running():
        yield server


def installed(name: str) -> Agent:
    agent = AGENTS[name]
    try:
        agent.install()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{agent.package} does not install: {error} {getattr(error, 'stderr', '')}")
    return agent


async def registered(server: Server, name: str, url: str) -> art.TrainableModel:
    model = art.TrainableModel(name=name, project="agents", base_model=str(server.path / "tiny-long"))
    await model.register(art.Backend(base_url=url))
    return model


@pytest.mark.parametrize("name", AGENTS)
async def test_a_published_agent_works_and_trains(long_server: Server, tmp_path: Path, name: str) -> None:
    agent = installed(name)
    model = await registered(long_server, name, long_server.url)
    proxy = ScriptedProxy(long_server.url, agent.answer)
    try:
        rans = [await roll_out(model, agent, proxy, tmp_path / "box", reward) for reward in (0.0, 1.0)]
    finally:
        proxy.close()
    for ran in rans:
        check_rollout(agent, ran)
    main = rans[0].main_requests(agent)
    tokens = [count_tokens(long_server.url, exchange) for exchange in (main[0], main[-1])]
    if name in LONG and "ART_TEST_FULL" not in os.environ:
        assert [len(ran.histories) for ran in rans] == [1, 1]
        write_row(row_of(agent, rans, tokens, None))
        return
    result = await model.train([art.TrajectoryGroup([ran.trajectory for ran in rans])])
    row = row_of(agent, rans, tokens, result)
    report = result.report
    assert report.turns == {"ledger": 2 * len(main)} and report.num_trained_tokens > 0, row
    assert result.metrics["loss/logprob_gap_num_tokens"] == report.num_trained_tokens
    later = 2 * (len(main) - 1)
    assert report.continuations == {"changed" if name in RENDERS_ANEW else "joined": later}, row
    write_row(row)


async def test_the_page_s_rollout_of_claude_code(
    long_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = installed("claude-code-with-four-tools")
    monkeypatch.setenv("PATH", f"{(agent.folder / agent.executable).parent}:{os.environ['PATH']}")
    names: dict[str, Any] = {}
    await run("coding-agents.md", 0, names)
    proxy = ScriptedProxy(long_server.url, agent.answer)
    try:
        model = await registered(long_server, "page", proxy.url)
        trajectory = await names["rollout"](model, TASK, tmp_path)
    finally:
        proxy.close()
    assert trajectory.reward == 1.0 and len(trajectory.messages_and_choices) > 2


def check_rollout(agent: Agent, ran: Ran) -> None:
    """The agent did its task, and each of its requests was answered as it expects."""
    seen = [(exchange.method, exchange.path, exchange.status) for exchange in ran.exchanges]
    assert ran.is_written and ran.code == 0, (seen, ran.printed[-3000:])
    answers = [exchange.status for exchange in ran.exchanges if exchange.api is not None and exchange.method == "POST"]
    assert answers and set(answers) == {200}, seen
    side = sum(agent.kind_of(exchange) == "side" for exchange in ran.exchanges)
    assert side == SIDE_CALLS.get(agent.name, 0), seen
    assert len(ran.main_requests(agent)) == (3 if agent.has_tools else 2), seen
