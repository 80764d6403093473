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
