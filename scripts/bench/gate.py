"""Measures how many requests one server process proxies, with an engine that samples nothing.

    python scripts/bench/gate.py [--requests 4000] [--concurrency 64]

Prints one JSON line: requests per second, the server's CPU seconds per 1,000 requests, median and 99th percentile of
the latency. This process generates the load, over keep-alive connections.
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
from urllib.parse import urlsplit

import httpx

SIMULATED = Path(__file__).with_name("simulated_engine.py")
START = f"""
import sys
from art_server.engine import command
real = command.engine_command
def simulated(*arguments):
    python, _, _, *rest = real(*arguments)
    return [python, {str(SIMULATED)!r}, *rest]
command.engine_command = simulated
from art_server.cli import main
main()
"""


def start_server(path: Path) -> tuple[subprocess.Popen[bytes], str]:
    arguments = ["--path", str(path), "--port", "0", "--inference-port", "0"]
    process = subprocess.Popen([sys.executable, "-c", START, *arguments, "--base-model", "art/tiny"])
    file = path / ".server" / "address.json"
    while not file.exists():
        assert process.poll() is None, "the server did not start"
        time.sleep(0.05)
    url = json.loads(file.read_text())["url"]
    while True:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return process, url
        except httpx.TransportError:
            pass
        time.sleep(0.1)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(url: str, model: str, requests: int, concurrency: int) -> list[float]:
    """Sends the requests and returns their latencies in seconds."""
    address = urlsplit(url)
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "a question of usual length " * 4}],
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-type: application/json\r\n"
    request = head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body
    left = iter(range(requests))
    latencies: list[float] = []

    async def one() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for _ in left:
            started = time.perf_counter()
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            size = answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(size))
            latencies.append(time.perf_counter() - started)
        writer.close()

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return latencies


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=64)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, url = start_server(Path(folder))
        try:
            asyncio.run(load(url, "art/tiny", 200, flags.concurrency))
            before = cpu_seconds(process.pid)
            started = time.perf_counter()
            latencies = asyncio.run(load(url, "art/tiny", flags.requests, flags.concurrency))
            seconds = time.perf_counter() - started
            used = cpu_seconds(process.pid) - before
        finally:
            process.terminate()
            process.wait()
    latencies.sort()
    print(
        json.dumps(
            {
                "requests_per_second": round(flags.requests / seconds, 1),
                "server_cpu_seconds_per_1000": round(used / flags.requests * 1000, 3),
                "median_ms": round(statistics.median(latencies) * 1000, 2),
                "p99_ms": round(latencies[int(len(latencies) * 0.99)] * 1000, 2),
                "concurrency": flags.concurrency,
                "requests": flags.requests,
            }
        )
    )


if __name__ == "__main__":
    main()
