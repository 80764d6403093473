"""Compares our server with vLLM alone on coding agents' sessions: many at a time, each sending its whole conversation at each turn.

    python scripts/bench/long_sessions.py [--sessions 32] [--turns 20] [--pairs 3]

Both serve art/tiny with 131,072 positions and the same flags, with prefix caching. All sessions have one system prompt of about 3,000
tokens; a turn adds an answer of 24 tokens and a tool's result of about 350. In each pair the sides run all sessions in turns, with
texts that no earlier pair had. vLLM's requests ask for log-probabilities, which a trainer needs from vLLM and not from us.

Prints a JSON line for each pair and one with the medians: requests per second of both, the ratio, and the share of the prompts' tokens that
each took from its prefix cache. The figures are void unless both sides sampled equally many tokens for equally many requests.
"""

import argparse
import asyncio
import json
import re
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import serving
from tqdm import tqdm

from art_server.store.base_models import TINY_DIR

ANSWER_TOKENS = 24
COUNTERS = re.compile(r"^vllm:prefix_cache_(hits|queries)_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)
RULES = "Read a file before you change the file, and run the tests when you have changed the file. " * 70
FLAGS = ["--max-seq-length", "65536", "--kv-cache-gb", "3"]


def long_tiny(folder: Path) -> Path:
    """art/tiny with more positions."""
    base = folder / "tiny"
    shutil.copytree(TINY_DIR, base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131_072}))
    return base


async def talk(http: aiohttp.ClientSession, body: dict[str, Any], name: str, num_turns: int) -> int:
    """One session. Returns the number of sampled tokens."""
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": f"Mend the parser of {name}."}]
    num_tokens = 0
    for turn in range(num_turns):
        async with http.post("/v1/chat/completions", json=body | {"messages": messages, "seed": turn}) as response:
            assert response.status == 200, await response.text()
            reply = await response.json()
        num_tokens += reply["usage"]["completion_tokens"]
        answer = reply["choices"][0]["message"]["content"]
        result = "\n".join(f"{line}: value_{name}_{turn} = function(argument_{line})" for line in range(17))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": result}]
    return num_tokens


async def cached(http: aiohttp.ClientSession) -> dict[str, float]:
    """Tokens of all prompts so far, and how many of them the prefix cache had."""
    async with http.get("/metrics") as response:
        return {name: float(value) for name, value in COUNTERS.findall(await response.text())}


async def side(
    http: aiohttp.ClientSession, body: dict[str, Any], pair: int, flags: argparse.Namespace
) -> dict[str, Any]:
    before, started = await cached(http), time.perf_counter()
    names = [f"{pair}_{number}" for number in range(flags.sessions)]
    num_tokens = sum(await asyncio.gather(*(talk(http, body, name, flags.turns) for name in names)))
    seconds = time.perf_counter() - started
    after = await cached(http)
    hits, queries = (after[name] - before[name] for name in ("hits", "queries"))
    return {
        "requests_per_second": flags.sessions * flags.turns / seconds,
        "tokens": num_tokens,
        "prompt_tokens": queries,
        "cached_share": hits / queries,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        base = long_tiny(path)
        folders = [path / "ours", path / "vllm"]
        for own in folders:
            own.mkdir()
        processes = [
            serving.start_ours(folders[0], str(base), FLAGS),
            serving.start_vllm(folders[1], str(base), base, max_seq_length=65536, kv_cache_gb=3),
        ]
        timeout = aiohttp.ClientTimeout(total=3600)
        ours, vllm = (
            aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) for _, url in processes
        )
        try:
            async with ours, vllm:
                for (process, _), session, ready in zip(processes, (ours, vllm), ("/ready", "/health"), strict=True):
                    await serving.wait_ready(process, session, ready)
                await measure(ours, vllm, str(base), flags)
        finally:
            for process, _ in processes:
                process.terminate()
            for process, _ in processes:
                process.wait()


async def measure(
    ours: aiohttp.ClientSession, vllm: aiohttp.ClientSession, base: str, flags: argparse.Namespace
) -> None:
    body = {
        "model": base,
        "max_tokens": ANSWER_TOKENS,
        "min_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 1.0,
    }
    sides = {"ours": (ours, body), "vllm": (vllm, body | {"logprobs": True})}
    pairs: list[dict[str, dict[str, Any]]] = []
    for pair in tqdm(range(flags.pairs)):
        order = list(sides) if pair % 2 else list(sides)[::-1]
        measured = {name: await side(sides[name][0], sides[name][1], pair, flags) for name in order}
        assert measured["ours"]["tokens"] == measured["vllm"]["tokens"], measured
        print(json.dumps(measured), flush=True)
        pairs.append(measured)

    def median(name: str, figure: str) -> float:
        return statistics.median(pair[name][figure] for pair in pairs)

    rates = [pair["ours"]["requests_per_second"] / pair["vllm"]["requests_per_second"] for pair in pairs]
    shares = {name: round(median(name, "cached_share"), 4) for name in sides}
    print(json.dumps({"ratio": round(statistics.median(rates), 3), "cached_share": shares}))


if __name__ == "__main__":
    asyncio.run(main())
