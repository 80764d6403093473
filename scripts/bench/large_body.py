"""Measures the latency of other requests while art-server reads a large train request.

    python scripts/bench/large_body.py [--mb 100] [--group-mb 0.75] [--form ndjson | json | art]

Starts a server with a simulated engine and a trainer that computes nothing. One program sends the body, whose choices
carry their tokens and log-probabilities; another asks for `/health` every ten milliseconds, and for chat completions
one after the other. Prints one JSON line: milliseconds of both kinds of requests without and with the body, the seconds
until the job is accepted, and the server's peak memory above idle in MB. `json` is one object on one line, `art` the
call of ART's clients.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from train_requests import NAME, PROJECT, memory_gib, reset_peak, start_server

IDLE_SECONDS = 5.0
TOKENS = 1000
"""The sampled tokens of one trajectory."""


def group(number: int, megabytes: float) -> bytes:
    """The JSON of a group whose trajectories have one choice each, as OpenAI's clients send it back."""
    trajectories: list[Any] = []
    size = 0
    while size < megabytes * 1e6:
        ids = [300 + (number * 31 + len(trajectories) * 7 + i) % 700 for i in range(TOKENS)]
        entries = [
            {"token": "ok", "bytes": [111, 107], "logprob": -0.25 - i % 97 / 97, "top_logprobs": []} for i in ids
        ]
        choice = {
            "finish_reason": "stop",
            "index": 0,
            "message": {"role": "assistant", "content": "ok " * TOKENS},
            "logprobs": {"content": entries, "refusal": None},
            "token_ids": ids,
            "prompt_token_ids": [300 + number % 700, 301],
        }
        messages = [{"role": "user", "content": f"question {number}"}, choice]
        reward = float(len(trajectories) % 2)
        trajectories.append({"messages_and_choices": messages, "reward": reward})
        size += len(json.dumps(trajectories[-1], separators=(",", ":")))
    return json.dumps({"trajectories": trajectories}, separators=(",", ":")).encode()


def write_body(file: Path, flags: argparse.Namespace) -> None:
    groups = [group(n, flags.group_mb) for n in range(max(1, round(flags.mb / flags.group_mb)))]
    if flags.form == "ndjson":
        file.write_bytes(b"\n".join([b"{}", *groups]))
        return
    start = b'{"groups":['
    if flags.form == "art":
        start = json.dumps({"model": {"name": NAME, "project": PROJECT}}).encode()[:-1]
        start += b',"trajectory_groups":['
    file.write_bytes(start + b",".join(groups) + b"]}")


def send(url: str, path: str, file: Path) -> None:
    """Prints the seconds until the answer to the body begins."""
    started = time.monotonic()
    headers = {"content-type": "application/json"}
    with (
        file.open("rb") as body,
        httpx.stream("POST", url + path, content=body, headers=headers, timeout=600) as answer,
    ):
        answer.raise_for_status()
        first = next(answer.iter_bytes())
        assert b'"error"' not in first, first
    print(time.monotonic() - started)


async def ask_health(http: httpx.AsyncClient, milliseconds: list[float]) -> None:
    while True:
        started = time.monotonic()
        (await http.get("/health")).raise_for_status()
        milliseconds.append(1000 * (time.monotonic() - started))
        await asyncio.sleep(0.01)


async def ask_chat(http: httpx.AsyncClient, milliseconds: list[float]) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": f"{PROJECT}/{NAME}", "messages": messages, "max_tokens": 4}
    while True:
        started = time.monotonic()
        (await http.post("/v1/chat/completions", json=body)).raise_for_status()
        milliseconds.append(1000 * (time.monotonic() - started))


async def measure(url: str, pid: int, file: Path, flags: argparse.Namespace) -> dict[str, Any]:
    megabytes = round((await asyncio.to_thread(file.stat)).st_size / 1e6, 1)
    path = "/_train_model" if flags.form == "art" else f"/api/models/{PROJECT}/{NAME}/train"
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        model = {"name": NAME, "project": PROJECT, "base_model": "art/tiny"}
        (await http.post("/api/models", json=model)).raise_for_status()
        health, chat = list[float](), list[float]()
        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(ask_health(http, health)),
                tasks.create_task(ask_chat(http, chat)),
            ]
            await asyncio.sleep(IDLE_SECONDS)
            idle = {"health": figures(health), "chat": figures(chat)}
            health.clear()
            chat.clear()
            before = memory_gib(pid, "VmRSS")
            reset_peak(pid)
            command = [sys.executable, __file__, "--send", url, path, str(file)]
            sender = await asyncio.create_subprocess_exec(*command, stdout=-1)
            output, _ = await sender.communicate()
            assert sender.returncode == 0
            peak = 1024 * (memory_gib(pid, "VmHWM") - before)
            for task in asking:
                task.cancel()
        return {
            "form": flags.form,
            "body_mb": megabytes,
            "group_mb": flags.group_mb,
            "idle": idle,
            "meanwhile": {"health": figures(health), "chat": figures(chat)},
            "seconds_until_accepted": round(float(output), 1),
            "server_peak_mb_above_idle": round(peak),
        }


def figures(milliseconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(milliseconds, n=100)
    values = {"median": cuts[49], "p99": cuts[98], "max": max(milliseconds)}
    return {name: round(value, 1) for name, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=float, default=100.0)
    parser.add_argument("--group-mb", type=float, default=0.75)
    parser.add_argument("--form", choices=["ndjson", "json", "art"], default="ndjson")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "body"
        write_body(file, flags)
        (Path(folder) / "art").mkdir()
        process, url = start_server(Path(folder) / "art", "art/tiny", is_trained=False)
        try:
            print(json.dumps(asyncio.run(measure(url, process.pid, file, flags))))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--send"]:
        send(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    else:
        main()
