"""Compares our server with vLLM alone: throughput and added latency, on one machine with the same requests.

    python scripts/bench/serving.py [--pairs 8] [--max-tokens 128] [--prompt-tokens 3000] [--logprobs-of both]

Starts an art-server (capture and splicing on) and a plain vLLM with the same flags. Sends both the same requests, a few
seconds each in turn, at concurrency 1, 16 and 64, whole and streamed. vLLM's requests ask for log-probabilities, which
a trainer needs from vLLM and not from art-server (`--logprobs-of both`: both ask). Prints one JSON line per cell:
tokens per second and median latency of both, and the ratio and the difference within a pair. All figures are medians
over the pairs, because the speed of such machines changes by half within minutes. The last line contains the throughput
that log-probabilities cost vLLM alone.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from art_server.engine.command import engine_command, engine_environment
from art_server.settings import ServerConfig
from art_server.store.base_models import TINY_DIR, BaseModel

MODEL = "art/tiny"
PLAIN_VLLM = """import art_server, runpy  # which lets vLLM import torchvision beside a CPU's torch
runpy.run_module("vllm.entrypoints.launchers.api_server.entry", run_name="__main__", alter_sys=True)"""


def start_ours(path: Path, base: str = MODEL, flags: Sequence[str] = ()) -> tuple[subprocess.Popen[bytes], str]:
    arguments = ["--path", str(path), "--port", "0", "--inference-port", "0", "--base-model", base, *flags]
    with open(path / "ours.log", "wb") as log:
        command = [sys.executable, "-m", "art_server", *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    file = path / ".server" / "address.json"
    while not file.exists():
        assert process.poll() is None, "art-server did not start"
        time.sleep(0.1)
    return process, json.loads(file.read_text())["url"]


def start_vllm(
    path: Path, name: str = MODEL, folder: Path = TINY_DIR, **settings: Any
) -> tuple[subprocess.Popen[bytes], str]:
    """Starts vLLM's own server with the flags that art-server passes to it, but on a TCP port."""
    config, base = ServerConfig(path=path, base_model=name, **settings), BaseModel(name, folder)
    command = engine_command(config, base, "cpu", path)
    at = command.index("--uds")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command[at : at + 2] = ["--host", "127.0.0.1", "--port", str(port)]
    with open(path / "vllm.log", "wb") as log:
        process = subprocess.Popen(
            [command[0], "-c", PLAIN_VLLM, *command[4:]],
            env=engine_environment(config, base, "cpu", os.environ),
            stdout=log,
            stderr=log,
        )
    return process, f"http://127.0.0.1:{port}"


async def wait_ready(process: subprocess.Popen[bytes], session: aiohttp.ClientSession, path: str) -> None:
    while True:
        assert process.poll() is None, f"{process.args} ended"
        try:
            async with session.get(path) as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.5)


async def load(
    session: aiohttp.ClientSession,
    body: dict[str, Any],
    requests: int,
    concurrency: int,
    seed: int = 0,
    filler: str = "",
) -> tuple[float, float]:
    """Tokens per second and the median latency in ms. Lengths vary from 0.5 to 1.5 times max_tokens, so that requests
    start and end at different times, as an agent's requests do. Prompts end with `filler`."""
    half = body["max_tokens"] // 2
    lengths = [half + (number + seed) * 13 % (2 * half + 1) for number in range(requests)]
    numbers = iter(range(requests))
    latencies: list[float] = []

    async def one() -> None:
        for number in numbers:
            text = f"Repeat: word {number + seed} and some more of it" + filler
            started = time.perf_counter()
            message = {"role": "user", "content": text}
            asked = body | {"messages": [message], "max_tokens": lengths[number]}
            async with session.post("/v1/chat/completions", json=asked) as response:
                assert response.status == 200, await response.text()
                await response.read()
            latencies.append((time.perf_counter() - started) * 1000)

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(concurrency)))
    seconds = time.perf_counter() - started
    return sum(lengths) / seconds, statistics.median(latencies)


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128, help="mean number of sampled tokens")
    parser.add_argument("--prompt-tokens", type=int, default=0, help="further tokens of a prompt")
    parser.add_argument("--logprobs-of", choices=("vllm", "both"), default="vllm")
    flags = parser.parse_args()
    # Requests at concurrency 1 are short: in a long one, the engine's time would hide the latency that the server adds.
    short = max(2, flags.max_tokens // 16)
    flags.cells = [
        (1, 8, 6 * flags.pairs, short),
        (16, 64, flags.pairs, flags.max_tokens),
        (64, 192, flags.pairs, flags.max_tokens),
    ]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        processes = [start_ours(Path(one)), start_vllm(Path(two))]
        timeout = aiohttp.ClientTimeout(total=600)
        ours, vllm = (
            aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) for _, url in processes
        )
        try:
            async with ours, vllm:
                for (process, _), session, path in zip(processes, (ours, vllm), ("/ready", "/health"), strict=True):
                    await wait_ready(process, session, path)
                await measure(ours, vllm, flags)
        finally:
            for process, _ in processes:
                process.terminate()
            for process, _ in processes:
                process.wait()


async def measure(ours: aiohttp.ClientSession, vllm: aiohttp.ClientSession, flags: argparse.Namespace) -> None:
    body = {"model": MODEL, "max_tokens": flags.max_tokens, "ignore_eos": True, "logprobs": True}
    filler = " and" * flags.prompt_tokens
    for session in (ours, vllm):
        await load(session, body, 64, 64, filler=filler)
    for stream in (False, True):
        for concurrency, requests, pairs, max_tokens in flags.cells:
            asked = body | {"stream": stream, "max_tokens": max_tokens}
            results: list[dict[str, tuple[float, float]]] = []
            for pair in tqdm(range(pairs), desc=f"stream={stream} concurrency={concurrency}"):
                has_both = flags.logprobs_of == "both"
                sides = {"ours": (ours, asked | {"logprobs": has_both}), "vllm": (vllm, asked)}
                order = list(sides) if pair % 2 else list(sides)[::-1]
                results.append(
                    {
                        name: await load(session, wanted, requests, concurrency, pair, filler)
                        for name in order
                        for session, wanted in [sides[name]]
                    }
                )
            print(json.dumps(cell(stream, concurrency, results)), flush=True)
    ratios: list[float] = []
    for _ in range(flags.pairs):
        with_them = await load(vllm, body, 256, 64)
        without = await load(vllm, body | {"logprobs": False}, 256, 64)
        ratios.append(with_them[0] / without[0])
    cost = 1 - statistics.median(ratios)
    print(json.dumps({"cost_of_logprobs_in_vllm_alone": round(cost, 3)}))


def cell(stream: bool, concurrency: int, results: list[dict[str, tuple[float, float]]]) -> dict[str, Any]:
    """The JSON line of a cell: medians of both sides, and of the ratio and difference within a pair."""

    def median(of: Callable[[dict[str, tuple[float, float]]], float]) -> float:
        return statistics.median(of(pair) for pair in results)

    return {
        "stream": stream,
        "concurrency": concurrency,
        "tokens_per_second_ours": round(median(lambda pair: pair["ours"][0])),
        "tokens_per_second_vllm": round(median(lambda pair: pair["vllm"][0])),
        "ratio": round(median(lambda pair: pair["ours"][0] / pair["vllm"][0]), 3),
        "median_ms_ours": round(median(lambda pair: pair["ours"][1]), 2),
        "median_ms_vllm": round(median(lambda pair: pair["vllm"][1]), 2),
        "added_ms": round(median(lambda pair: pair["ours"][1] - pair["vllm"][1]), 2),
    }


if __name__ == "__main__":
    asyncio.run(main())
