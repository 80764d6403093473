"""A real server with two replicas, requests of all APIs to it, and faults of its replicas."""

import json
import os
import re
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.engine.integration.answers import WEATHER_TOOL
from tests.live import Server, descendants
from tests.waiting import PATIENCE_SECONDS, wait_until

IS_FULL = os.environ.get("ART_TEST_FULL") == "1"
"""The sizes of issue 38's shows, for which a machine needs half an hour each."""
HANG, IDLE, LOAD = 8.0, 3.0, 30.0
"""Seconds after which an engine is hung, after which it is probed, and after which a load of an adapter has failed."""
CHILD, CORE, WORKER = "art_server.engine.vllm_process.child", "VLLM::EngineCore", "VLLM::Worker"
QUESTION = "respond with yes, no, maybe"


@dataclass
class FleetServer(Server):
    """A server whose hung engines are found soon. `patch` is code that runs before it starts."""

    num_engines: int = 2
    patch: str = ""

    def command(self) -> list[str]:
        lines = [
            "import sys",
            "from art_server import cli",
            "from art_server.engine import engine, routing",
            f"engine.HANG_SECONDS, engine.IDLE_SECONDS, engine.LOAD_SECONDS = {HANG}, {IDLE}, {LOAD}",
            self.patch,
            "cli.main(sys.argv[1:])",
        ]
        return [sys.executable, "-c", "\n".join(lines), "--engines", str(self.num_engines)]

    def replicas(self) -> list[dict[str, Any]]:
        return httpx.get(f"{self.url}/health", timeout=PATIENCE_SECONDS).json()["replicas"]

    def wait_all_ready(self) -> None:
        wait_until(lambda: all(replica["engine"] == "ready" for replica in self.replicas()), self.log_tail)

    def find(self, number: int, mark: str) -> int:
        """The id of a process of one replica: its sockets' folder is in the command of its child."""
        assert self.process is not None
        note = (self.path / "art" / ".server" / f"run_dir-engine-{number}").read_text()
        folder = note.splitlines()[0]
        (child,) = [
            pid for pid in descendants(self.process.pid) if folder in command_of(pid) and CHILD in command_of(pid)
        ]
        return child if mark == CHILD else next(pid for pid in descendants(child) if mark in command_of(pid))

    def hits(self) -> tuple[float, float]:
        """vLLM's counters of prompt tokens: those found in a prefix cache, and all."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE_SECONDS).text
        return sum_of(text, "vllm:prefix_cache_hits_total"), sum_of(text, "vllm:prefix_cache_queries_total")


def sum_of(metrics: str, name: str) -> float:
    return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)", metrics, re.MULTILINE)))


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill(server: FleetServer, number: int, mark: str) -> None:
    os.kill(server.find(number, mark), signal.SIGKILL)


def stop(server: FleetServer, number: int, mark: str) -> None:
    """As a process that hangs."""
    os.kill(server.find(number, mark), signal.SIGSTOP)


@dataclass
class Outcome:
    """What became of the requests."""

    choices: Counter[str] = field(default_factory=Counter)
    """Of whole answers and ended streams, by API."""
    ids: list[str] = field(default_factory=list)
    """Of the choices that name their record."""
    lost_streams: int = 0
    """Streams that had begun and ended with the retryable error."""
    wrong: list[str] = field(default_factory=list)


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {}),
    ("chat", {"stream": True}),
    ("chat", {"n": 3}),
    ("chat", {"tools": [WEATHER_TOOL]}),
    ("responses", {}),
    ("responses", {"stream": True}),
    ("messages", {}),
    ("messages", {"stream": True}),
    ("completions", {}),
    ("chat", {"n": 2, "stream": True}),
]


def body_of(number: int, model: str) -> tuple[str, dict[str, Any]]:
    """Request number `number`: its API and its body. Rollouts of a group share their question."""
    api, more = KINDS[number % len(KINDS)]
    question = f"{QUESTION} {number // 8}"
    body: dict[str, Any] = {"model": model, **more}
    if api == "completions":
        return api, body | {"prompt": question, "max_tokens": 24}
    if api == "responses":
        return api, body | {"input": question, "max_output_tokens": 24}
    return api, body | {"messages": [{"role": "user", "content": question}], "max_tokens": 24}


PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


async def ask(http: httpx.AsyncClient, number: int, model: str, outcome: Outcome) -> None:
    """Sends a request, and notes what came of it."""
    api, body = body_of(number, model)
    response = await http.post(PATHS.get(api, "/v1/completions"), json=body)
    if response.status_code != 200:
        outcome.wrong.append(f"{number} {api}: {response.status_code} {response.text}")
        return
    choices: list[dict[str, Any]] = []
    if body.get("stream"):
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        if error := next((event["error"] for event in events if event.get("error")), None):
            if error.get("code") == "engine_restarted" and error["retryable"]:
                outcome.lost_streams += 1
            else:
                outcome.wrong.append(f"{number} {api}: {error}")
            return
        parts = [part for event in events for part in event.get("choices", ())]
        choices = [part for part in parts if "art" in part]
        if api in ("responses", "messages") and events[-1]["type"] not in ("response.completed", "message_stop"):
            outcome.wrong.append(f"{number} {api}: cut off after {events[-1]}")
            return
    else:
        choices = response.json().get("choices", [])
    unrecorded = [choice for choice in choices if "unrecorded" in choice["art"]]
    if unrecorded or (api in ("chat", "completions") and len(choices) != body.get("n", 1)):
        outcome.wrong.append(f"{number} {api}: {choices}")
        return
    outcome.ids += [choice["art"]["id"] for choice in choices]
    outcome.choices[api] += body.get("n", 1)
