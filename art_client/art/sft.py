"""Trajectories as supervised training takes them: each alone in a group, with a weight for each assistant message."""

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, TypeVar

from art.gather import is_informative
from art.trajectories import History, Trajectory, TrajectoryGroup

Schedule: TypeAlias = Literal["linear", "cosine", "constant"]

H = TypeVar("H", bound=History)


def choose(given: Iterable[Trajectory | TrajectoryGroup], *, best_of_group: bool) -> list[Trajectory]:
    """The trajectories, with those of groups: all, or the best one if the group's rewards differ (the first of equals)."""
    chosen: list[Trajectory] = []
    for each in given:
        if isinstance(each, Trajectory):
            chosen.append(each)
        elif not best_of_group:
            chosen += each.trajectories
        elif is_informative(each):
            chosen.append(max(each.trajectories, key=lambda trajectory: trajectory.reward))
    return chosen


def as_group(trajectory: Trajectory, turns: Literal["all", "last"]) -> TrajectoryGroup:
    """A group of a copy of the trajectory. Its `turn_advantages` are 1 for trained messages and 0 for others, unless it
    has some already."""
    others = [_weigh(history, turns) for history in trajectory.additional_histories]
    weighed = _weigh(trajectory, turns)
    return TrajectoryGroup([weighed.model_copy(update={"additional_histories": others})])


def _weigh(history: H, turns: Literal["all", "last"]) -> H:
    if history.turn_advantages is not None:
        return history
    num = sum(_role(entry) == "assistant" for entry in history.messages_and_choices)
    weights = [1.0] * num if turns == "all" else [0.0] * (num - 1) + [1.0] * bool(num)
    return history.model_copy(update={"turn_advantages": weights})


def _role(entry: Any) -> str | None:
    """The role of a message or of a sampled choice."""
    if isinstance(entry, dict):
        return "assistant" if "finish_reason" in entry else str(entry.get("role"))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return "assistant" if hasattr(entry, "finish_reason") else getattr(entry, "role", None)
