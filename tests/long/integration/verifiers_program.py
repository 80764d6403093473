"""Plays two agents of an environment of verifiers, and prints what came of it as a line of JSON. Runs in .venv-verifiers."""

import asyncio
import json

import art
from art.environments.verifiers import EpisodeFailed, VerifiersEnvironment


async def main() -> None:
    model = art.TrainableModel(name="pair", project="verifiers", base_model="art/tiny")
    async with art.Backend() as backend, VerifiersEnvironment("verifiers_tasks") as environment:
        await model.register(backend)
        try:
            environment.tasks()
        except ValueError as error:
            infinite = str(error)
        good, other, broken = environment.tasks(3)
        groups = await environment.gather(model, [good, other, broken], 4, max_exceptions=0.5, max_tokens=8)
        failures = [exception.message for group in groups for exception in group.exceptions]
        result = await model.train(
            [group for group in groups if group.trajectories], art.TrainConfig(learning_rate=1e-3, baseline="none")
        )
        try:
            await environment.rollout(model, good, max_tokens=8)
        except ValueError as error:
            several = str(error)
        try:
            await environment.rollout(model, broken, max_tokens=8)
        except EpisodeFailed as error:
            failed = str(error)
    outcome = {
        "groups": [
            {
                "agent": group.metadata["agent"],
                "rewards": [trajectory.reward for trajectory in group],
                "turns": [trajectory.metrics["num_turns"] for trajectory in group],
                "metrics": sorted({name for trajectory in group for name in trajectory.metrics}),
                "tasks": sorted({str(trajectory.metadata["task"]) for trajectory in group}),
            }
            for group in groups
        ],
        "failures": failures,
        "report": result.report.model_dump(),
        "errors": {"infinite": infinite, "several": several, "failed": failed},
    }
    print(json.dumps(outcome))


asyncio.run(main())
