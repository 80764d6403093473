"""What a backend reports after its train and log calls: to its trackers, and to the program's own `on_step`."""

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from art import tracing
from art.contained import contained
from art.trajectories import Trajectory, TrajectoryGroup
from art.types import TrainResult
from art_protocol.tracking import RolloutRow, StepRecord, make_rows, open_trackers
from art_protocol.wire import LogReply, ModelInfo

logger = logging.getLogger(__name__)

OnStep: TypeAlias = Callable[[StepRecord], Awaitable[object] | object]
"""A function that is called with each record. Only the first exception of the function is logged."""


class Reporting:
    """The trackers and the `on_step` of one backend."""

    def __init__(self, names: Sequence[str], on_step: OnStep | None, folder: Path) -> None:
        self._trackers = open_trackers(names, folder)
        self._on_step = on_step
        self._has_warned = False
        self._models: dict[tuple[str, str], ModelInfo] = {}
        self._has_traces = tracing.start_program(names)

    def know(self, info: ModelInfo) -> None:
        """Remembers the server's information about a model."""
        self._models[info.project, info.name] = info

    async def trained(self, model: tuple[str, str], groups: Sequence[TrajectoryGroup], result: TrainResult) -> None:
        """Reports a train call. `model` is the model's project and its name on the server."""
        if self._is_on:
            config, report = self._config(model) | result.report.config, result.report
            rows = functools.partial(group_rows, groups)
            step, metrics = result.step, result.metrics
            await self._report(StepRecord(*model, step, "train", metrics, config, groups, report, rows))

    async def logged(
        self,
        model: tuple[str, str],
        entries: Iterable[Trajectory | BaseException | TrajectoryGroup],
        split: str,
        reply: LogReply,
    ) -> None:
        """Reports a log call. Trajectories outside a group form one group."""
        if self._is_on:
            entries = list(entries)
            groups = [entry for entry in entries if isinstance(entry, TrajectoryGroup)]
            if bare := [entry for entry in entries if not isinstance(entry, TrajectoryGroup)]:
                groups.append(TrajectoryGroup(bare))
            rows = functools.partial(group_rows, groups)
            step, metrics, config = reply.step, reply.metrics, self._config(model)
            await self._report(StepRecord(*model, step, split, metrics, config, groups, None, rows))

    @property
    def _is_on(self) -> bool:
        return bool(self._trackers) or self._on_step is not None

    def _config(self, model: tuple[str, str]) -> dict[str, Any]:
        info = self._models.get(model)
        return {} if info is None else {"base_model": info.base_model, "lora": info.lora.model_dump()}

    async def _report(self, record: StepRecord) -> None:
        for tracker in self._trackers:
            tracker.report(record)
        if self._on_step is not None:
            await self._call(self._on_step, record)

    async def _call(self, on_step: OnStep, record: StepRecord) -> None:
        try:
            with contained("on_step"):
                result = on_step(record)
                if inspect.isawaitable(result):
                    await result
        except Exception as error:  # the step is trained, whatever the program's hook raises
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "on_step failed at step %d (%s). Its further errors are not logged",
                    record.step,
                    error,
                    exc_info=error,
                )

    async def close(self) -> None:
        """Delivers what is queued; takes some seconds at most."""
        for tracker in self._trackers:
            await asyncio.to_thread(tracker.close)
        if self._has_traces:
            await asyncio.to_thread(tracing.close_program)


def group_rows(groups: Iterable[TrajectoryGroup]) -> Iterator[RolloutRow]:
    """The rollouts of groups."""
    for number, group in enumerate(groups):
        trained = [(trajectory.reward, trajectory.messages()) for trajectory in group.trajectories]
        failed = [(failure.type, failure.message) for failure in group.exceptions]
        yield from make_rows(number, cast(Any, trained), failed)  # Any: messages are plain dicts
