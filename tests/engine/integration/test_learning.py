"""Learning in use on the real server: what is served after a good step, and after a step that broke; and what texts teach."""

import time
from typing import Any

import httpx
import pytest

import art
from art_protocol.history import read_rows
from tests.live import PROJECT, Server, chat, register

COMMENT = "The answer should be maybe."


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


@pytest.mark.anyio
async def test_a_comment_trains_the_advantages_that_distill_computes(server: Server) -> None:
    register(server, "taught")
    answers: list[dict[str, Any]] = []
    with server.client() as client:
        routes = learn(client, "taught", 1e-4)
        for number in range(8):
            messages = [{"role": "user", "content": f"respond with yes, no or maybe {number}"}]
            asked = {"messages": messages, "logprobs": True, "return_token_ids": True}
            answer = chat(client, f"{PROJECT}/taught", **asked)
            answers.append({**answer["choices"][0], "prompt_token_ids": answer["prompt_token_ids"]})
            score = {"answer": answer["id"], "value": 0, "comment": COMMENT, "user": f"u{number}"}
            assert client.post(f"{routes}/feedback", json=score).status_code == 202
        until(client, routes, {"trained": 8})
    rows = read_rows(server.model_dir("taught") / "trajectories" / "train" / "0001.jsonl.gz")
    trained = [row["trajectories"][0]["turn_advantages"] for row in rows]
    expected = await distilled(server.url, answers)
    assert trained == [[pytest.approx(values, abs=1e-3) for values in of_turns] for of_turns in expected]
    assert max(abs(value) for (of_turn,) in trained for value in of_turn) > 0.1, "the text changes something"


async def distilled(url: str, answers: list[dict[str, Any]]) -> list[list[list[float]]]:
    """The advantages of `art.distill` for answers of an untrained model, by answer and turn."""
    async with art.Backend(url) as backend:
        teacher = art.TrainableModel(name="untaught", project=PROJECT, base_model="art/tiny")
        await teacher.register(backend)
        trajectories: list[art.Trajectory] = []
        for number, choice in enumerate(answers):
            messages: Any = [{"role": "user", "content": f"respond with yes, no or maybe {number}"}, choice]
            trajectories.append(art.Trajectory(messages_and_choices=messages, reward=0.0))
        (group,) = await art.distill(
            [art.TrajectoryGroup(trajectories)],
            teacher,
            teacher_messages=lambda messages, *_: art.with_feedback(messages, feedback=COMMENT),
        )
    taught: Any = [trajectory.turn_advantages for trajectory in group]
    return taught
