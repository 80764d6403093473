"""Sessions find their prompts: vLLM's own counters of two replicas, of one engine, and of two that take turns."""

import concurrent.futures
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live import chat
from tests.long.fleet.fleets import FleetServer
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="as the other tests of a fleet")

NUM_SESSIONS, NUM_TURNS = 16, 5
TAKE_TURNS = """
import itertools
turns = itertools.count()
routing.Router.choose = lambda self, key, loads: sorted(loads)[next(turns) % len(loads)]
"""


def hit_rate(folder: Path, num_engines: int, patch: str = "") -> float:
    """The share of prompt tokens that prefix caches had, over sessions of several turns at a time."""
    folder.mkdir()
    server = FleetServer(folder, num_engines=num_engines, patch=patch)
    server.arguments = ["--base-model", "art/tiny", "--max-seq-length", "2048"]
    with server.running():
        server.wait_all_ready()
        before = server.hits()
        with concurrent.futures.ThreadPoolExecutor(NUM_SESSIONS) as threads:
            list(threads.map(lambda number: play(server, number), range(NUM_SESSIONS)))
        hits, queries = (after - start for after, start in zip(server.hits(), before, strict=True))
    return hits / queries


def play(server: FleetServer, number: int) -> None:
    """A session whose conversation grows by a question and an answer in each turn."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"You are number {number}. " * 8}]
    with httpx.Client(base_url=f"{server.url}/s/session-{number}", timeout=PATIENCE_SECONDS) as client:
        for turn in range(NUM_TURNS):
            messages.append({"role": "user", "content": f"In turn {turn}, repeat after me: one two three " * 4})
            answer = chat(client, "art/tiny", messages=messages, max_tokens=64, ignore_eos=True)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


def test_two_replicas_find_what_one_engine_finds(tmp_path: Path) -> None:
    one = hit_rate(tmp_path / "one", 1)
    two = hit_rate(tmp_path / "two", 2)
    turns = hit_rate(tmp_path / "turns", 2, TAKE_TURNS)
    print(f"prefix hits: one engine {one:.3f}, two replicas {two:.3f}, two that take turns {turns:.3f}")
    assert two >= 0.95 * one and turns <= 0.8 * one
