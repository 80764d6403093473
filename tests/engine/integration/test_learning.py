"""Learning in use on the real server: what is served after a good step, and after a step that broke."""

import time
from typing import Any

import httpx

from tests.live import PROJECT, Server, chat, register


def learn(client: httpx.Client, name: str, learning_rate: float) -> str:
    """The model's routes. Its learning is on, with batches of eight."""
    routes = f"/api/models/{PROJECT}/{name}"
    config = {"baseline": "none", "scaling": "batch_std", "normalisation": "trajectory", "learning_rate": learning_rate}
    policy = {"batch": 8, "least": 2, "user_share": 1, "config": config}
    assert client.put(f"{routes}/learning", json=policy).status_code == 200
    return routes


def score_a_batch(client: httpx.Client, name: str, routes: str) -> None:
    for number in range(8):
        messages = [{"role": "user", "content": f"respond with yes or no {number}"}]
        answer = chat(client, f"{PROJECT}/{name}", messages=messages)
        score = {"answer": answer["id"], "value": number % 2, "user": f"u{number}"}
        assert client.post(f"{routes}/feedback", json=score).status_code == 202


def until(client: httpx.Client, routes: str, counts: dict[str, int]) -> dict[str, Any]:
    """How the model learns, once its scores are in these states and no release is open with an undecided step."""
    while True:
        info: dict[str, Any] = client.get(f"{routes}/learning").json()
        if info["counts"] == counts and info["release"]["reason"] is not None:
            return info
        time.sleep(0.2)


def test_a_step_serves_behind_the_guard_and_a_broken_one_never(server: Server) -> None:
    register(server, "learns")
    with server.client() as client:
        routes = learn(client, "learns", 1e-4)
        score_a_batch(client, "learns", routes)
        info = until(client, routes, {"trained": 8})
        assert (info["serving_step"], info["release"]["reason"]) == (1, "step 1 has passed the guard")
        learn(client, "learns", 1.0)
        score_a_batch(client, "learns", routes)
        info = until(client, routes, {"trained": 8, "dropped": 8, "dropped: rolled_back": 8})
        assert "the guard has refused step 2: " in info["release"]["reason"]
        assert info["serving_step"] == 1
