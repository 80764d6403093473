"""Trains on a taskset of verifiers, and measures held-out tasks before and after training.

    scripts/setup-verifiers
    export ART_SERVER_URL=http://127.0.0.1:7623 PYTHONPATH=$PWD/examples/tasksets
    .venv-verifiers/bin/python examples/tasksets/train.py

A taskset is an installed package, or a folder of PYTHONPATH (a whole path): verifiers starts its tools as `python -m arithmetic.tools`.

The taskset is unchanged: verifiers loads it by its id, serves its tools and scores its episodes. Prints one line of
JSON for each step, and one line before and after training. For a real model change `--base-model` and the learning rate
(1e-5 to 1e-4).
"""

import argparse
import asyncio
import json
import statistics

import art
from art.environments.verifiers import VerifiersEnvironment

ARITHMETIC = {"taskset": {"id": "arithmetic", "num_tasks": 120}, "agent": {"max_turns": 4}}
GROUPS, GROUP_SIZE = 6, 8


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=json.loads, default=ARITHMETIC, help="verifiers' settings, in JSON")
    parser.add_argument("--base-model", default="art/tiny")
    parser.add_argument("--name", default="verifiers")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--held-out", type=int, default=48, help="tasks that are not trained")
    parser.add_argument("--max-tokens", type=int, default=64)
    flags = parser.parse_args()

    model = art.TrainableModel(name=flags.name, project="examples", base_model=flags.base_model)
    async with art.Backend() as backend, VerifiersEnvironment(flags.config) as played:
        await model.register(backend)
        tasks = played.tasks()
        held_out, training = tasks[: flags.held_out], tasks[flags.held_out :]

        async def measure() -> float:
            groups = await played.gather(model, held_out, 1, max_tokens=flags.max_tokens)
            return statistics.fmean(t.reward for group in groups for t in group)

        print(json.dumps({"held_out": await measure()}), flush=True)
        for step in range(flags.steps):
            first = step * GROUPS % max(1, len(training) - GROUPS + 1)
            groups = await played.gather(
                model, training[first : first + GROUPS], GROUP_SIZE, max_tokens=flags.max_tokens
            )
            result = await model.train(groups, art.TrainConfig(learning_rate=flags.learning_rate))
            line = {"step": result.step, "reward": result.metrics["train/reward"]}
            print(json.dumps(line | {"report": result.report.model_dump()}), flush=True)
        print(json.dumps({"held_out": await measure()}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
