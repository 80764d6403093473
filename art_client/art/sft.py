"""Trajectories as supervised training takes them: each alone in a group, with a weight for each assistant message."""

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, TypeVar

from art.trajectories import History, Trajectory, TrajectoryGroup, is_informative

Schedule: TypeAlias = Literal["linear", "cosine", "constant"]

H = TypeVar("H", bound=History)


def choose(entries: Iterable[Trajectory | TrajectoryGroup], *, best_of_group: bool) -> list[Trajectory]:
    """The trajectories, and the trajectories of the groups. With `best_of_group` a group has only its best trajectory (the
    first of equals), and none if all its rewards are equal.

    Raises:
        TypeError: an entry is neither of both.
    """
    chosen: list[Trajectory] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, Trajectory):
            chosen.append(entry)
        elif not isinstance(entry, TrajectoryGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"trajectories[{index}] is a {type(entry).__name__}, not art.Trajectory: write "
                "`art.Trajectory(messages_and_choices=...)` with the messages"
            )
        elif not best_of_group:
            chosen += entry.trajectories
        elif is_informative(entry):
            chosen.append(max(entry.trajectories, key=lambda trajectory: trajectory.reward))
    return chosen


def as_group(trajectory: Trajectory, turns: Literal["all", "last"]) -> TrajectoryGroup:
    """A group with a copy of the trajectory. The `turn_advantages` of each history are 1 for trained messages and 0 for
    others. A history that has `turn_advantages` keeps them."""
    others = [_weigh(history, turns) for history in trajectory.additional_histories]
    weighed = _weigh(trajectory, turns)
    return TrajectoryGroup([weighed.model_copy(update={"additional_histories": others})])


def _weigh(history: H, turns: Literal["all", "last"]) -> H:
    if history.turn_advantages is not None:
        return history
    num_turns = sum(_role(entry) == "assistant" for entry in history.messages_and_choices)
    weights = [1.0] * num_turns
    if turns == "last":
        weights[:-1] = [0.0] * (num_turns - 1)
    return history.model_copy(update={"turn_advantages": weights})


def _role(entry: Any) -> str | None:
    """The role of a message or of a sampled choice."""
    if isinstance(entry, dict):
        return "assistant" if "finish_reason" in entry else str(entry.get("role"))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return "assistant" if hasattr(entry, "finish_reason") else getattr(entry, "role", None)
