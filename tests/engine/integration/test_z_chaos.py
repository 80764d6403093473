"""Killed processes: nothing acknowledged is lost, nothing is done twice, no process is left over. Runs last, because it
restarts the server that the other tests share."""

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

import httpx
import pytest

from tests.live import PROJECT, Server, chat, descendants, find_process, register, sampled_group, train_one_step
from tests.processes import wait_until_gone
from tests.waiting import PATIENCE_SECONDS, wait_until

ENGINE = "art_server.engine.vllm_process.child"
"""The process that vLLM's API server runs in."""


CORE = "VLLM::EngineCore"


TWO_RANKS = ["--ranks", "2"]


def num_running(client: httpx.Client) -> float:
    """Requests that vLLM works on."""
    counts = re.findall(r"^vllm:num_requests_running\S* (\S+)", client.get("/metrics").text, re.M)
    return sum(map(float, counts))


def test_the_engine_dies_under_load(server: Server) -> None:
    """Its core, of which vLLM's API process knows first: that answers with errors, then ends. Sixteen requests at a time:
    whole answers are sampled again, a stream that has begun ends with a retryable error; the next ones succeed."""
    register(server, "load")
    train_one_step(server, "load")

    def ask(number: int) -> tuple[int, dict[str, Any]]:
        with server.client() as client:
            body = {
                "model": f"{PROJECT}/load",
                "messages": [{"role": "user", "content": f"Repeat: one two three {number}"}],
                "max_tokens": 120,
                "ignore_eos": True,
                "stream": number % 4 == 0,
            }
            response = client.post("/v1/chat/completions", json=body)
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        if not events:  # a whole answer, or an error before a stream began
            return response.status_code, response.json()
        assert events[-1] == "[DONE]"
        return response.status_code, json.loads(events[-2])

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(ask, number) for number in range(24)]
        with server.client() as client:
            wait_until(lambda: num_running(client) > 8)
        old = find_process(server, ENGINE)
        os.kill(find_process(server, CORE), signal.SIGKILL)
        results = [future.result(PATIENCE_SECONDS) for future in futures]
    for number, (status, body) in enumerate(results):
        assert status == 200, body
        if "error" in body:
            assert number % 4 == 0, "only begun streams may be told to repeat"
            assert body["error"]["retryable"] is True and body["error"]["code"] == "engine_restarted"
        else:
            assert body["choices"]
    with server.client() as client:
        choice = chat(client, f"{PROJECT}/load")["choices"][0]
        assert choice["art"]["step"] == 1
    assert find_process(server, ENGINE) != old


def test_the_server_is_killed_during_a_step(server: Server) -> None:
    """The job was acknowledged, so it ends exactly once: after the restart, under the same key."""
    register(server, "during")
    with server.client() as client:
        model = f"{PROJECT}/during"
        group = sampled_group(client, model, size=8)
    body = json.dumps({"groups": [group], "config": {"learning_rate": 1e-4, "passes": 32}}).encode()
    headers = {"idempotency-key": "during-1", "content-type": "application/json"}
    url = f"/api/models/{model}/train"
    family: set[int] = set()
    with (
        pytest.raises(httpx.TransportError),
        server.client() as client,
        client.stream("POST", url, content=body, headers=headers) as response,
    ):
        for line in response.iter_lines():
            if json.loads(line).get("phase") == "train":
                assert server.process is not None
                family = descendants(server.process.pid)
                server.kill()
    wait_until_gone(family)
    checkpoints = server.model_dir("during") / "checkpoints"
    assert [p.name for p in checkpoints.iterdir() if p.name.isdigit()] == ["0000"]
    server.arguments += TWO_RANKS  # which the next test needs: one start is enough for both
    server.start()
    with server.client() as client:
        events = client.post(url, content=body, headers=headers).text.splitlines()
        done = json.loads(events[-1])
        assert done["event"] == "done" and done["step"] == 1
        assert client.get(f"/api/models/{model}").json()["step"] == 1
        assert json.loads(client.post(url, content=body, headers=headers).text.splitlines()[-1]) == done
        assert chat(client, model)["choices"][0]["art"]["step"] == 1
    assert sorted(p.name for p in checkpoints.iterdir()) == ["0000", "0001"]
    history = (server.model_dir("during") / "history.jsonl").read_text().splitlines()
    assert len(history) == 1


def test_a_rank_is_killed_during_a_step(server: Server) -> None:
    """`--ranks 2`: the job is trained once, by both ranks that follow, and `scripts/replay.py` makes the same bits with two."""
    if TWO_RANKS[0] not in server.arguments:  # this test runs alone
        server.stop()
        server.arguments += TWO_RANKS
        server.start()
    register(server, "ranks")
    with server.client() as client:
        model = f"{PROJECT}/ranks"
        groups = [sampled_group(client, model, size=6) for _ in range(2)]
        body = json.dumps({"groups": groups, "config": {"learning_rate": 1e-4, "passes": 32}}).encode()
        headers = {"idempotency-key": "ranks-1", "content-type": "application/json"}
        killed = 0
        events: list[dict[str, Any]] = []
        with client.stream("POST", f"/api/models/{model}/train", content=body, headers=headers) as response:
            for line in response.iter_lines():
                events.append(json.loads(line))
                if events[-1].get("phase") == "train" and not killed:
                    killed = find_process(server, '"rank":1')
                    os.kill(killed, signal.SIGKILL)
        assert (events[-1]["event"], events[-1]["step"]) == ("done", 1), events[-1]
        assert chat(client, model)["choices"][0]["art"]["step"] == 1
    wait_until_gone({killed})
    history = (server.model_dir("ranks") / "history.jsonl").read_text().splitlines()
    assert len(history) == 1
    checkpoint = json.loads((server.model_dir("ranks") / "checkpoints/0001/checkpoint.json").read_text())
    assert checkpoint["environment"]["ranks"] == "2"
    command = [sys.executable, "scripts/replay.py", f"{PROJECT}/ranks", "--path", str(server.path / "art")]
    replayed = subprocess.run(command, capture_output=True, text=True)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
