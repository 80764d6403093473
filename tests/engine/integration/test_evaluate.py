"""Evaluation on a real vLLM: the base model against a trained step, twice with the same numbers."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

import art
from tests.live import PROJECT, Server

pytestmark = pytest.mark.anyio

REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
PROMPTS = [f"respond with {', '.join(words)}" for words in itertools.permutations(REWARDS)]
PROMPTS += [f"answer with {', '.join(words)}" for words in itertools.permutations(REWARDS)]
NUM_STEPS = 8


async def rollout(model: art.TrainableModel, prompt: str) -> art.Trajectory:
    messages: art.Messages = [{"role": "user", "content": prompt}]
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=8
    )
    choice = completion.choices[0]
    reward = REWARDS.get((choice.message.content or "").strip(".").lower(), 0.0)
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward)


@pytest.fixture
async def model(server: Server) -> AsyncIterator[art.TrainableModel]:
    async with art.Backend(server.url) as backend:
        model = art.TrainableModel(name="evaluated", project=PROJECT, base_model="art/tiny")
        await model.register(backend)
        config = art.TrainConfig(learning_rate=2e-3, normalisation="trajectory")
        for _ in range(await model.get_step(), NUM_STEPS):
            groups = await art.gather_trajectory_groups(
                (art.TrajectoryGroup(rollout(model, prompt) for _ in range(8)) for prompt in PROMPTS), min_informative=4
            )
            await model.train(groups, config)
        yield model


def texts(evaluation: art.Evaluation) -> list[Any]:
    return [trajectory.messages()[-1].get("content") for group in evaluation.groups for trajectory in group]


def sampled_by(evaluation: art.Evaluation) -> set[tuple[str | None, int | None]]:
    choices: Any = [trajectory.messages_and_choices[-1] for group in evaluation.groups for trajectory in group]
    return {(choice.art["model"], choice.art["step"]) for choice in choices}


async def test_a_trained_step_is_compared_with_the_base_reproducibly(model: art.TrainableModel) -> None:
    options: Any = {"baseline": "base", "reps": 3, "seed": 11}
    first = await art.evaluate(model, rollout, PROMPTS, **options)
    assert first.baseline is not None and first.difference is not None
    assert first.difference.num_scenarios == len(PROMPTS) and first.num_failed == 0
    assert first.difference.interval[0] > 0, first
    assert sampled_by(first) == {(f"{PROJECT}/evaluated", NUM_STEPS)}
    assert sampled_by(first.baseline) == {(None, None)}

    second = await art.evaluate(model, rollout, PROMPTS, **options)
    assert second.baseline is not None
    assert (texts(second), second) == (texts(first), first)
    assert texts(second.baseline) == texts(first.baseline)
    other = await art.evaluate(model, rollout, PROMPTS, **options | {"seed": 12, "log": False})
    assert texts(other) != texts(first)


async def test_step_0_equals_the_base_and_the_best_step_answers_to_its_name(
    server: Server, model: art.TrainableModel
) -> None:
    untrained = await art.evaluate(model, rollout, PROMPTS, step=0, baseline="base", seed=3)
    assert untrained.baseline is not None and texts(untrained) == texts(untrained.baseline)
    trained = await art.evaluate(model, rollout, PROMPTS, seed=3)
    by_step = {checkpoint.step: checkpoint for checkpoint in await model.checkpoints()}
    assert by_step[0].metrics["val/reward"] == pytest.approx(untrained.reward.mean)
    assert by_step[NUM_STEPS].metrics["val/reward"] == pytest.approx(trained.reward.mean)
    assert by_step[NUM_STEPS].is_best

    body = {"model": f"{PROJECT}/evaluated@best", "messages": [{"role": "user", "content": "hi"}]}
    with server.client() as client:
        answer = client.post("/v1/chat/completions", json=body | {"max_tokens": 2})
    assert answer.headers["x-art-step"] == str(NUM_STEPS)
    assert answer.json()["model"] == f"{PROJECT}/evaluated@best"
    assert answer.json()["choices"][0]["art"]["step"] == NUM_STEPS


async def test_a_captured_request_of_any_client_has_the_next_seed(model: art.TrainableModel) -> None:
    body = {"model": model.get_inference_name(), "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 8}

    async def answers(first_seed: str, **more: Any) -> list[str]:
        async with httpx.AsyncClient(base_url=f"{model.inference_base_url}/", timeout=None) as client:
            with art.capture("seeds", step="base", seed=first_seed):
                replies = [await client.post("chat/completions", json=body | more) for _ in range(12)]
        return [reply.raise_for_status().json()["choices"][0]["message"]["content"] for reply in replies]

    first = await answers("a")
    assert first == await answers("a") and len(set(first)) > 1, "each request has another seed"
    assert first != await answers("b")
    assert len(set(await answers("a", seed=5))) == 1, "a request's own seed counts"
