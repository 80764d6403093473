"""A program that trains with a pipeline and may be killed at any time, and what must be true of its steps.

    python -m tests.pipeline_program URL NAME '{"steps": 6, "bound": 1, ...}'

Every fourth group is slow: its rollouts have ten turns.
"""

import asyncio
import itertools
import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import art
from art_protocol.history import read_rows

PROJECT = "tests"
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
WORDS = [*itertools.permutations(REWARDS)]
PROMPTS = [f"{verb} with {', '.join(words)}" for verb in ("respond", "answer") for words in WORDS]
SLOW_TURNS = 10
GROUP_SIZE = 8


def is_slow(number: int) -> bool:
    return number % 4 == 3


async def rollout(model: art.TrainableModel, prompt: str, num_turns: int) -> art.Trajectory:
    entries: art.MessagesAndChoices = []
    messages: art.Messages = []
    rewards: list[float] = []
    for _ in range(num_turns):
        question: Any = {"role": "user", "content": prompt}
        entries.append(question)
        messages.append(question)
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=6
        )
        choice = completion.choices[0]
        entries.append(choice)
        answer: Any = {"role": "assistant", "content": choice.message.content or ""}
        messages.append(answer)
        rewards.append(REWARDS.get((choice.message.content or "").strip(), 0.0))
    return art.Trajectory(messages_and_choices=entries, reward=sum(rewards) / num_turns)


async def roll_group(model: art.TrainableModel, number: int, config: dict[str, Any]) -> art.TrajectoryGroup:
    prompt = random.Random(f"{config.get('seed', 0)} {number}").choice(PROMPTS)
    num_turns = SLOW_TURNS if config.get("slow") and is_slow(number) else 1
    group = art.TrajectoryGroup(
        (rollout(model, prompt, num_turns) for _ in range(GROUP_SIZE)), metadata={"number": number}
    )
    return await group


async def train(url: str, name: str, config: dict[str, Any]) -> None:
    async with art.Backend(url) as backend:
        model = art.TrainableModel(name=name, project=PROJECT, base_model="art/tiny")
        await model.register(backend)
        trainer = art.PipelineTrainer(
            model,
            backend,
            roll_group,
            itertools.count(),
            config,
            groups_per_step=config["groups"],
            max_steps_off_policy=config["bound"],
            max_steps=config["steps"],
            train_config=art.TrainConfig(learning_rate=1e-3, normalisation="trajectory"),
        )
        await trainer.train()


def check_steps(jobs: Iterable[dict[str, Any]], folder: Path, config: dict[str, Any]) -> list[list[int]]:
    """The numbers of each step's groups. `jobs` are the model's in their order, `folder` is the server's of the model."""
    jobs = list(jobs)
    assert [job["step"] for job in jobs] == list(range(1, config["steps"] + 1))
    numbers: list[list[int]] = []
    for job in jobs:
        newest, sampled = job["step"] - 1, [*map(int, job["report"]["sampled_steps"])]
        assert sampled and newest - config["bound"] <= min(sampled) <= max(sampled) <= newest, (job["step"], sampled)
        rows = read_rows(folder / "trajectories" / "train" / f"{job['step']:04d}.jsonl.gz")
        numbers.append([group["metadata"]["number"] for group in rows])
        assert len(numbers[-1]) == config["groups"]
    trained = [*itertools.chain(*numbers)]
    assert sorted(trained) == list(range(len(trained))), "each scenario once, none left out"
    return numbers


if __name__ == "__main__":
    asyncio.run(train(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
