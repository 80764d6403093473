"""A taskset of verifiers, and what test_verifiers.py does with it. Runs in .venv-verifiers, and prints a line of JSON."""

# pyright: reportMissingImports=false
# (.venv lacks verifiers.)

import asyncio
import json
import os
import sys
from typing import Any

import verifiers.v1 as vf

import art
from art.environments.verifiers import EpisodeFailed, VerifiersEnvironment

__all__ = ["WordTaskset"]

TASKSET = "words_with_timeouts"
sys.modules[TASKSET] = sys.modules[__name__]  # verifiers imports a taskset by its name
STAGES = ("setup", "finalize", "scoring")


class WordData(vf.TaskData):
    late: str | None
    """The stage that takes too long."""
    is_scored: bool = True


class WordTask(vf.Task[WordData]):
    async def _take_time(self, stage: str) -> None:
        if self.data.late == stage:
            await asyncio.sleep(60)

    async def setup(self, trace: vf.Trace) -> None:
        await self._take_time("setup")

    async def finalize(self, trace: vf.Trace) -> None:
        if not self.data.is_scored:
            trace.rewards["style"] = None
        await self._take_time("finalize")

    @vf.reward
    async def says_yes(self, trace: vf.Trace) -> float:
        await self._take_time("scoring")
        return float("yes" in trace.last_reply)


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self) -> Any:
        for stage in STAGES:
            timeout = {"timeout": {stage: 1.0}}
            yield self._task(stage, late=stage, **timeout)
        yield self._task("unscored", late=None, is_scored=False)
        yield self._task("good", late=None)

    def _task(self, name: str, **fields: Any) -> WordTask:
        data = WordData.model_validate({"prompt": "say yes", "name": name, **fields})
        return WordTask(data, self.config.task)


async def registered(backend: art.Backend, name: str) -> art.TrainableModel:
    model = art.TrainableModel(name=name, project="demo", base_model="art/tiny")
    await model.register(backend)
    return model


async def play_all() -> dict[str, float | str]:
    """Each task's reward, or why its episode failed."""
    results: dict[str, float | str] = {}
    async with art.Backend() as backend, VerifiersEnvironment(TASKSET) as environment:
        model = await registered(backend, "agent")
        for task in environment.tasks():
            try:
                results[task.data.name] = (await environment.rollout(model, task)).reward
            except EpisodeFailed as error:
                results[task.data.name] = str(error)
    return results


async def play_with_two_keys() -> list[str]:
    """The environment variables that an agent's programs would see of the keys."""
    async with (
        art.Backend(api_key="key-of-a") as one,
        art.Backend(api_key="key-of-b") as other,
        VerifiersEnvironment(TASKSET) as environment,
    ):
        models = [await registered(one, "a"), await registered(other, "b")]
        good = environment.tasks()[-1]
        await asyncio.gather(*(environment.rollout(model, good) for model in models))
    return [
        name
        for name, value in os.environ.items()
        if value.startswith("key-of-") and "API_KEY" not in name  # what verifiers leaves out
    ]


if __name__ == "__main__":
    play = {"all": play_all, "keys": play_with_two_keys}[sys.argv[1]]
    print(json.dumps({"results": asyncio.run(play())}))
