"""docs/howto/finetune-parts.md: a builder, an adapter and a trainer of one's own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import art
import art.finetune
from plugins.finetune.tests.policy_server import PolicyServer
from tests.pages import blocks

pytestmark = pytest.mark.anyio


async def test_each_part_can_be_replaced(
    policy: PolicyServer, folder: Path, make_file: Callable[..., dict[str, Any]]
) -> None:
    for code in blocks("finetune-parts.md", "python"):
        name = code.partition("\n")[0].removeprefix("# ")
        assert len(code.splitlines()) <= 40
        (folder / name).write_text(code)
    file = make_file(
        trajectory_builders__b___type="short_builder.py:ShortBuilder",
        trainer_adapters__a___type="keeping_adapter.py:KeepingAdapter",
        trainers__t={"_type": "stopping_trainer.py:StoppingTrainer", "enough": 0.4},
        finetuning__num_epochs=5,
    )
    statuses = await art.finetune.run(file)
    assert len(statuses) == 1, "the first epoch was good enough"
    kept = [json.loads(line) for line in (folder / "out" / "epoch-0.jsonl").read_text().splitlines()]
    assert sorted({row["reward"] for row in kept}) == [-0.02, 0.98], "a hundredth for each of two tokens"
    assert kept[0]["messages"][0]["content"] == "question 0"
    (request,) = policy.trained
    trajectories = [trajectory for group in request["groups"] for trajectory in group["trajectories"]]
    assert {trajectory["reward"] for trajectory in trajectories} == {-0.02, 0.98}


BARE = """
import art
from art.finetune import TrainingJobStatus

class Builder:
    def __init__(self, section, run):
        self.num_generations, self.context = section.num_generations, run

    async def sample(self, epoch, row_indices):
        return [await self.group(epoch, index) for index in row_indices]

    async def group(self, epoch, index):
        run, trajectories = self.context, []
        for number in range(self.num_generations):
            trajectory, output = await run.agent.play(run.model, run.rows[index], f"{epoch}-{index}-{number}", number)
            trajectories.append(trajectory)
        return art.TrajectoryGroup(trajectories)

class Adapter:
    def __init__(self, section, run):
        self.context = run

    async def train(self, groups, epoch):
        return await self.context.model.train(groups, self.context.train_config)

class Trainer:
    def __init__(self, section, run, builder, adapter):
        self.context, self.builder, self.adapter = run, builder, adapter

    async def run(self, num_epochs):
        statuses = []
        for epoch in range(num_epochs):
            groups = await self.builder.sample(epoch, range(len(self.context.rows)))
            result = await self.adapter.train(groups, epoch)
            statuses.append(TrainingJobStatus(epoch, result.step))
        return statuses
"""


@pytest.mark.usefixtures("policy")
async def test_a_part_with_a_method_of_earlier_versions_is_wrong_input(
    folder: Path, make_file: Callable[..., dict[str, Any]]
) -> None:
    code = "import art.finetune\nclass Old(art.finetune.ArtTrainerAdapter):\n    async def submit(self, trajectories): ...\n"
    (folder / "old.py").write_text(code)
    with pytest.raises(art.finetune.WrongInput, match="'submit'"):
        await art.finetune.run(make_file(trainer_adapters__a___type="old.py:Old"))


@pytest.mark.parametrize("has_own_trainer", [False, True])
async def test_a_part_of_one_s_own_is_a_class_with_one_method(
    policy: PolicyServer, folder: Path, make_file: Callable[..., dict[str, Any]], has_own_trainer: bool
) -> None:
    (folder / "bare.py").write_text(BARE)
    file = make_file(
        trajectory_builders__b___type="bare.py:Builder",
        trainer_adapters__a___type="bare.py:Adapter",
        trainers__t___type="bare.py:Trainer" if has_own_trainer else "openpipe_art_trainer",
    )
    statuses = await art.finetune.run(file)
    assert [(status.epoch, status.step, status.status) for status in statuses] == [
        (0, 1, "completed"),
        (1, 2, "completed"),
    ]
    assert policy.steps == {"demo/agent": 2} and len(policy.asked) == 16
