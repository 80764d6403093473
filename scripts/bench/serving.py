"""Through our server against vLLM alone: throughput and added latency, on the same machine and the same requests.

    python scripts/bench/serving.py [--repeats 3] [--requests 192] [--max-tokens 32]

Starts an art-server (capture and splicing on) and a plain vLLM with the same flags, and asks both in turn for the same
completions with log-probabilities, concurrency 1, 16 and 64, whole and streamed. Prints one JSON line a cell: tokens per
second of both (medians of the repeats), their ratio, and the median latencies. A last line tells what asking for
log-probabilities costs vLLM alone.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from art_server.base_models import TINY_DIR, BaseModel
from art_server.engine.command import SOCKET_NAME, engine_command, engine_environment
from art_server.settings import ServerConfig

MODEL = "art/tiny"


def start_ours(path: Path) -> tuple[subprocess.Popen[bytes], str]:
    arguments = ["--path", str(path), "--port", "0", "--inference-port", "0", "--base-model", MODEL]
    with open(path / "ours.log", "wb") as log:
        command = [sys.executable, "-m", "art_server.cli", *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    file = path / ".server" / "address.json"
    while not file.exists():
        assert process.poll() is None, "art-server did not start"
        time.sleep(0.1)
    return process, json.loads(file.read_text())["url"]


def start_vllm(path: Path) -> tuple[subprocess.Popen[bytes], str]:
    """vLLM's own server with the flags that ours gives it, on a Unix socket as well."""
    config = ServerConfig(path=path, base_model=MODEL)
    command = engine_command(config, BaseModel(MODEL, TINY_DIR), "cpu", path)
    module = "vllm.entrypoints.launchers.api_server.entry"
    with open(path / "vllm.log", "wb") as log:
        process = subprocess.Popen(
            [command[0], "-m", module, *command[4:]],
            env=engine_environment(config, "cpu", os.environ),
            stdout=log,
            stderr=log,
        )
    return process, str(path / SOCKET_NAME)


async def wait_ready(session: aiohttp.ClientSession, path: str) -> None:
    while True:
        try:
            async with session.get(path) as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.5)


async def load(
    session: aiohttp.ClientSession, body: dict[str, Any], requests: int, concurrency: int
) -> tuple[float, float]:
    """Tokens per second and the median latency in ms. Every request samples exactly max_tokens."""
    numbers = iter(range(requests))
    latencies: list[float] = []

    async def one() -> None:
        for number in numbers:
            message = {"role": "user", "content": f"Repeat: word {number} and some more of it"}
            started = time.perf_counter()
            async with session.post(
                "/v1/chat/completions", json=body | {"messages": [message]}
            ) as response:
                assert response.status == 200, await response.text()
                await response.read()
            latencies.append((time.perf_counter() - started) * 1000)

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(concurrency)))
    seconds = time.perf_counter() - started
    return requests * body["max_tokens"] / seconds, statistics.median(latencies)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--max-tokens", type=int, default=32)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        processes = [start_ours(Path(one)), start_vllm(Path(two))]
        timeout = aiohttp.ClientTimeout(total=600)
        ours = aiohttp.ClientSession(
            processes[0][1], timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        )
        vllm = aiohttp.ClientSession(
            "http://vllm",
            timeout=timeout,
            connector=aiohttp.UnixConnector(processes[1][1], limit=0),
        )
        try:
            async with ours, vllm:
                await wait_ready(ours, "/ready")
                await wait_ready(vllm, "/health")
                await measure(ours, vllm, flags)
        finally:
            for process, _ in processes:
                process.terminate()
            for process, _ in processes:
                process.wait()


async def measure(
    ours: aiohttp.ClientSession, vllm: aiohttp.ClientSession, flags: argparse.Namespace
) -> None:
    body = {"model": MODEL, "max_tokens": flags.max_tokens, "ignore_eos": True, "logprobs": True}
    sides = {"ours": ours, "vllm": vllm}
    for session in sides.values():
        await load(session, body, 32, 16)
    for stream in (False, True):
        for concurrency in (1, 16, 64):
            requests = max(24, flags.requests // 4) if concurrency == 1 else flags.requests
            results: dict[str, list[tuple[float, float]]] = {"ours": [], "vllm": []}
            for _ in range(flags.repeats):
                for name, session in sides.items():
                    asked = body | {"stream": stream}
                    results[name].append(await load(session, asked, requests, concurrency))
            rate = {name: statistics.median(r for r, _ in rows) for name, rows in results.items()}
            late = {name: statistics.median(x for _, x in rows) for name, rows in results.items()}
            cell = {
                "stream": stream,
                "concurrency": concurrency,
                "tokens_per_second_ours": round(rate["ours"]),
                "tokens_per_second_vllm": round(rate["vllm"]),
                "ratio": round(rate["ours"] / rate["vllm"], 3),
                "median_ms_ours": round(late["ours"], 2),
                "median_ms_vllm": round(late["vllm"], 2),
                "added_ms": round(late["ours"] - late["vllm"], 2),
            }
            print(json.dumps(cell), flush=True)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(flags.repeats):
        for logprobs in (True, False):
            asked = body | {"logprobs": logprobs}
            rates[logprobs].append((await load(vllm, asked, flags.requests, 64))[0])
    cost = 1 - statistics.median(rates[True]) / statistics.median(rates[False])
    print(json.dumps({"cost_of_logprobs_in_vllm_alone": round(cost, 3)}))


if __name__ == "__main__":
    asyncio.run(main())
