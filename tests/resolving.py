"""Resolves all groups of a request at once."""

from collections.abc import Sequence
from typing import NamedTuple

from art_protocol.wire import JobReport, TrainConfig, TrajectoryGroupBody
from art_server.jobs.resolve import Limits, Resolver, Sources
from art_server.jobs.turns import TurnTrace
from art_server.process.shared.trainer_messages import Batch


class Resolved(NamedTuple):
    batch: Batch
    report: JobReport
    traces: list[list[list[TurnTrace]]]
    """What became of each turn, by group and trajectory."""


def resolve(
    groups: Sequence[TrajectoryGroupBody],
    config: TrainConfig,
    model_id: str,
    sources: Sources,
    limits: Limits,
) -> Resolved:
    resolver = Resolver(config, model_id, sources, limits)
    traces = [resolver.add(group) for group in groups]
    found = resolver.finish()
    return Resolved(found.batch, found.report, traces)
