"""Rollouts of a coding agent with a scripted policy, and a row of the table of agents."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

import art
from tests.long.coding_agents.agents import Access, Agent
from tests.long.coding_agents.scripted_proxy import Exchange, ScriptedProxy
from tests.waiting import PATIENCE_SECONDS, until

AGENT_SECONDS = 20 * 60.0


@dataclass
class Ran:
    """One rollout."""

    trajectory: art.Trajectory
    exchanges: list[Exchange]
    code: int
    printed: str
    is_written: bool
    """Whether the task's file has the word."""

    @property
    def histories(self) -> list[list[Any]]:
        """The conversations of the trajectory."""
        others = [history.messages_and_choices for history in self.trajectory.additional_histories]
        return [self.trajectory.messages_and_choices, *others]

    def main_requests(self, agent: Agent) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if agent.kind_of(exchange) == "main"]


async def roll_out(model: art.TrainableModel, agent: Agent, proxy: ScriptedProxy, folder: Path, reward: float) -> Ran:
    """A rollout in a folder that is made anew. Prompts name the folder, so the prompts of rollouts in the same folder are equal."""
    shutil.rmtree(folder, ignore_errors=True)
    home, work = folder / "home", folder / "work"
    home.mkdir(parents=True)
    work.mkdir()
    (work / "README.md").write_text("An empty project.\n")
    async with art.rollout(model, sampling=agent.sampling) as r:
        session = urlsplit(r.root_url).path
        root_url = proxy.url + session
        access = Access(f"{root_url}/v1", root_url, r.api_key, model.get_inference_name(), model.base_model, home, work)
        code, printed = await run_agent(agent, access)
        trajectory = await r.trajectory(reward=reward)
    exchanges = [exchange for exchange in proxy.exchanges if exchange.path.startswith(session)]
    file = work / "hello.txt"
    return Ran(trajectory, exchanges, code, printed, file.exists() and file.read_text().strip() == "hello")


async def run_agent(agent: Agent, access: Access) -> tuple[int, str]:
    """The exit status of an agent and what it printed. The agent's processes are gone afterwards."""
    for path, content in agent.settings(access).items():
        file = access.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    environment = {"PATH": os.environ["PATH"], "HOME": str(access.home), "TERM": "dumb", **agent.environment(access)}
    process = await asyncio.create_subprocess_exec(
        agent.folder / agent.executable,
        *agent.command(access),
        cwd=access.work,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), AGENT_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await until(lambda: not processes_at(access.home), lambda: processes_at(access.home))
    return process.returncode or 0, printed.decode(errors="replace")


def processes_at(home: Path) -> list[str]:
    """The command lines of the processes with this home folder."""
    lines = list[str]()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                lines.append(f"{process.pid} {process.cmdline()}")
    return lines


def count_tokens(server_url: str, exchange: Exchange) -> int:
    """The tokens of a request's prompt: the server answers the request again, with one token, in another session."""
    assert exchange.api is not None and exchange.body is not None
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens", "stream_options", "stream")
    body = {name: value for name, value in exchange.body.items() if name not in limits}
    body["max_output_tokens" if exchange.api == "responses" else "max_tokens"] = 1
    path = "/s/counting/v1" + exchange.path.partition("/v1")[2]
    response = httpx.post(server_url + path, json=body, timeout=PATIENCE_SECONDS)
    usage = response.json()["usage"]
    return usage["input_tokens" if "input_tokens" in usage else "prompt_tokens"]


def row_of(agent: Agent, rans: Sequence[Ran], tokens: Sequence[int], result: art.TrainResult | None) -> dict[str, Any]:
    """A row of docs/coding-agents.jsonl. `tokens` are the prompts of the first rollout's first and last main request; `result` is the
    training step's, None if none was trained."""
    main = rans[0].main_requests(agent)
    row = {
        "agent": agent.name,
        "package": agent.package,
        "api": main[0].api,
        "requests": dict(Counter(agent.kind_of(exchange) for exchange in rans[0].exchanges)),
        "tools": len(main[0].tools),
        "first_prompt_tokens": tokens[0],
        "last_prompt_tokens": tokens[1],
        "histories": [len(ran.histories) for ran in rans],
    }
    return row if result is None else row | trained_part(result)


def trained_part(result: art.TrainResult) -> dict[str, Any]:
    report, num_tokens = result.report, result.metrics["data/step_row_tokens"]
    return {
        "turns": report.turns,
        "continuations": report.continuations,
        "changed": [
            {"whose": difference.whose, "before": difference.expected, "after": difference.found}
            for difference in report.differences
        ],
        "row_tokens": int(num_tokens),
        "shared_tokens": int(num_tokens - result.metrics["data/step_computed_tokens"]),
        "trained_tokens": report.num_trained_tokens,
    }
