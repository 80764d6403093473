"""ART's path of `art.PipelineTrainer`, and ART's function that makes a group of single rollouts."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from art.pipeline import PipelineTrainer
from art.trajectories import Trajectory, TrajectoryGroup
from art_compat.models import TrainableModel

__all__ = ["PipelineTrainer", "make_group_rollout_fn"]

S = TypeVar("S")
C = TypeVar("C")


def make_group_rollout_fn(
    single_rollout_fn: Callable[[TrainableModel, S, C], Awaitable[Trajectory]], n: int = 4
) -> Callable[[TrainableModel, S, C], Awaitable[TrajectoryGroup]]:
    """A `rollout_fn` whose group has `n` rollouts of a scenario."""

    async def rollout_group(model: TrainableModel, scenario: S, config: C) -> TrajectoryGroup:
        return await TrajectoryGroup(single_rollout_fn(model, scenario, config) for _ in range(n))

    return rollout_group
