"""Hung or busy: an engine with a hung process is restarted, a slow engine is not.

The time limits are scaled down for CI; ART_TEST_FULL=1 uses the real ones.
"""

import concurrent.futures
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from art_server.engine import engine
from tests.live import Server, descendants
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

IS_FULL = os.environ.get("ART_TEST_FULL") == "1"
HANG, IDLE = (engine.HANG_SECONDS, engine.IDLE_SECONDS) if IS_FULL else (8.0, 3.0)
NUM_REQUESTS, NUM_TOKENS = 256 if IS_FULL else 160, 300
FULL_SECONDS = 180.0 if IS_FULL else 2 * HANG
"""For at least so long all batches are full."""
SLOWNESS = 300
"""The slow worker runs for one part in so many of the time, until the prompt has lasted for two limits."""
PROMPT_TOKENS = 3500

MAIN = """
import sys
from art_server import cli
from art_server.engine import engine
engine.HANG_SECONDS, engine.IDLE_SECONDS = {hang}, {idle}
cli.main(sys.argv[1:])
"""


class ScaledServer(Server):
    def command(self) -> list[str]:
        return [sys.executable, "-c", MAIN.format(hang=HANG, idle=IDLE)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    own = ScaledServer(tmp_path_factory.mktemp("hung"))
    own.arguments = ["--base-model", "art/tiny", "--engine-arg", "max_num_seqs=128"]
    own.arguments += ["--kv-cache-gb", "4" if IS_FULL else "1"]
    with own.running():
        yield own


def processes(server: Server) -> dict[str, int]:
    """The ids of vLLM's processes, by their kind."""
    assert server.process is not None
    pids: dict[str, int] = {}
    for pid in descendants(server.process.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        for name, mark in (
            ("core", "VLLM::EngineCore"),
            ("worker", "VLLM::Worker"),
            ("api", "art_server.engine.vllm_process.child"),
        ):
            if mark in command:
                pids.setdefault(name, pid)
                break
    return pids


def ask(server: Server, num_tokens: int, prompt: Any = "Say something") -> int:
    body = {"model": "art/tiny", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True}
    with server.client() as client:
        return client.post("/v1/completions", json=body | {"min_tokens": num_tokens}).status_code


def num_restarts(server: Server) -> int:
    return (server.path / "server.log").read_text().count("engine restarts")


@pytest.mark.parametrize("is_idle", [False, True], ids=["busy", "idle"])
@pytest.mark.parametrize("name", ["api", "core", "worker"])
def test_a_process_that_stands_still_is_found(server: Server, name: str, is_idle: bool) -> None:
    if not IS_FULL and (name, is_idle) != ("worker", False):
        pytest.skip("a minute each; with ART_TEST_FULL=1")
    server.wait_ready()
    before = num_restarts(server)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        asked = None if is_idle else threads.submit(ask, server, 2000)
        time.sleep(1.0)
        os.kill(processes(server)[name], signal.SIGSTOP)
        stopped = time.monotonic()
        wait_until(lambda: num_restarts(server) > before, server.log_tail)
        print(f"{name}, {'idle' if is_idle else 'busy'}: found after {time.monotonic() - stopped:.1f} s")
        server.wait_ready()
        assert asked is None or asked.result() == 200, "a whole request is sent again"
    assert ask(server, 5) == 200


def test_full_batches_for_minutes_are_work(server: Server) -> None:
    server.wait_ready()
    before, started = num_restarts(server), time.monotonic()

    def ask_for_minutes() -> set[int]:
        statuses = {ask(server, NUM_TOKENS)}
        while time.monotonic() - started < FULL_SECONDS:
            statuses.add(ask(server, NUM_TOKENS))
        return statuses

    with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as threads:
        asked = [threads.submit(ask_for_minutes) for _ in range(NUM_REQUESTS)]
        assert set().union(*(future.result() for future in asked)) == {200}
    print(f"{NUM_REQUESTS} requests of {NUM_TOKENS} tokens at a time: {time.monotonic() - started:.0f} s")
    assert num_restarts(server) == before
    assert ask(server, 5) == 200


@pytest.mark.skipif(not IS_FULL, reason="minutes; with ART_TEST_FULL=1")
def test_a_long_prompt_on_a_slow_engine_is_work(server: Server) -> None:
    """The worker runs only a small part of the time, so the prompt takes longer than the limit for a hung engine."""
    server.wait_ready()
    before, started = num_restarts(server), time.monotonic()
    worker, is_over = processes(server)["worker"], threading.Event()

    def slow_down() -> None:
        while not is_over.is_set() and time.monotonic() - started < 2 * HANG:
            os.kill(worker, signal.SIGSTOP)
            time.sleep(0.02 * (SLOWNESS - 1))
            os.kill(worker, signal.SIGCONT)
            time.sleep(0.02)

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        prompt = [5 + number % 200 for number in range(PROMPT_TOKENS)]
        assert ask(server, 1, prompt) == 200
    finally:
        is_over.set()
        thread.join()
    print(f"a prompt of {PROMPT_TOKENS} tokens: {time.monotonic() - started:.0f} s")
    assert time.monotonic() - started > HANG
    assert num_restarts(server) == before
