"""The reward of an answer or a session from its scores."""

import math
import statistics
from collections.abc import Iterable

from art_protocol.learning import Policy
from art_server.learning.scores import WaitingScore

DAY, HOUR = 86400.0, 3600.0


def reward_of(scores: Iterable[WaitingScore], policy: Policy) -> float:
    """The reward of scores: for each name the mean of its values, times the name's weight, summed."""
    values: dict[str, list[float]] = {}
    for score in scores:
        values.setdefault(score.name, []).append(score.value)
    return math.fsum(policy.names[name].weight * statistics.fmean(of_name) for name, of_name in values.items())
