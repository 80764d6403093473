"""Request bodies from trajectories, validated before anything is sent, so that an error names the invalid field.

A body is NDJSON: a line with the fields of the request, then a line for each group. Building and encoding a large body
takes a while, so callers run these functions in a thread.
"""

import functools
from collections.abc import Callable, Container, Iterable
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from art.entries import by_reference, readable
from art.trajectories import REDUCE, Trajectory, TrajectoryGroup
from art_protocol.wire import LogRequest, TrainConfig, TrainRequest, TrajectoryGroupBody


def build_train_request(
    groups: Iterable[TrajectoryGroup],
    config: TrainConfig,
    expected_step: int | None = None,
    whole: Container[str] = (),
) -> bytes:
    """The body of a train call. Choices that a server recorded are without their tokens, except the choices whose ids
    are in `whole`.

    Raises:
        ValueError: the groups cannot be trained on; the message names the field.
        TypeError: an element is not a TrajectoryGroup.
    """
    groups = list(groups)
    if not groups:
        raise ValueError(
            "there is nothing to train on: no groups were given; pass those of art.gather_trajectory_groups"
        )
    for index, group in enumerate(groups):
        if not isinstance(group, TrajectoryGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"groups[{index}] is {type(group).__name__}, not art.TrajectoryGroup: pass [art.TrajectoryGroup(trajectories)]"
            )
        if not group.trajectories and not group.exceptions:
            raise ValueError(f"groups[{index}] has neither a trajectory nor a failed rollout")
    config.check_rates(len(groups))
    fields = {"config": config, "expected_step": expected_step}
    return _encode(TrainRequest, fields, groups, functools.partial(by_reference, whole=whole))


def build_log_request(
    trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup],
    split: str,
    metrics: dict[str, float],
    step: int | None,
) -> bytes:
    """The body of a log call, without tokens. Trajectories outside a group form one group."""
    entries = list(trajectories)
    groups = [entry for entry in entries if isinstance(entry, TrajectoryGroup)]
    bare = [entry for entry in entries if not isinstance(entry, TrajectoryGroup)]
    if bare:
        groups.append(TrajectoryGroup(bare))
    fields = {"split": split, "metrics": metrics, "step": step}
    return _encode(LogRequest, fields, groups, readable)


def _encode(
    kind: type[BaseModel],
    fields: dict[str, Any],
    groups: list[TrajectoryGroup],
    reduce: Callable[[Any], dict[str, Any]],
) -> bytes:
    """A request's lines. `reduce` dumps the trajectories' entries."""
    lines = [_line(kind, fields, "")]
    for index, group in enumerate(groups):
        path = f"groups[{index}]"
        try:
            # Pydantic would warn of a field that the program has set to another type. The line's validation names the field.
            dumped = group.model_dump(mode="json", warnings=False, context={REDUCE: reduce})
            lines.append(_line(TrajectoryGroupBody, dumped, path))
        except (PydanticSerializationError, OverflowError) as error:
            raise ValueError(
                f"{_invalid_path(group, path)} cannot be JSON ({error}): use texts, numbers, lists and dictionaries"
            ) from None
    return b"\n".join(lines)


def _line(kind: type[BaseModel], fields: dict[str, Any], prefix: str) -> bytes:
    """The JSON of a part of the request; `prefix` is the path of this part in the request."""
    try:
        return kind.model_validate(fields).model_dump_json().encode()
    except ValidationError as error:
        first = error.errors()[0]
        parts = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
        path = f"{prefix}{parts}".lstrip(".")
        raise ValueError(f"{path}: {first['msg']}, got {first['input']!r:.100}") from error


def _invalid_path(group: TrajectoryGroup, group_path: str) -> str:
    """The path of the first part of a group that JSON cannot hold, such as half of a surrogate pair in a message."""
    parts: dict[str, BaseModel] = {
        f"{group_path}.trajectories[{index}]": trajectory for index, trajectory in enumerate(group.trajectories)
    }
    parts[group_path] = group
    for path, part in parts.items():
        for field in type(part).model_fields:
            try:
                part.model_dump_json(include={field}, warnings=False)
            except (PydanticSerializationError, OverflowError):
                return f"{path}.{field}"
    return group_path
