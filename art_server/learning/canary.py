"""What a canary's scores say: whether the users of the newer step are more content than those of the step that serves.

Both steps answer at the same time, so what changes for all users changes nothing here. A user's scores resemble one another. So the
statistic counts users: a ratio of sums, with the variance over users (Deng, Knoblich, Lu: Applying the Delta Method in Metric
Analytics, KDD 2018, section 2). Looks at fixed numbers of scores, with the same limit at all of them, are a group sequential test
(Pocock 1977); the last look decides by the sign alone.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from art_protocol.learning import Policy

MIN_USERS = 5
"""Fewer users of a step say nothing."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """The reward of an answer or a session, and who gave it."""

    user: str
    reward: float


@dataclass(frozen=True, slots=True)
class Arm:
    """The opinions of the users of one step."""

    num_scored: int
    num_users: int
    mean: float
    """NaN without an opinion."""
    variance: float
    """Of the mean."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the scores say at this moment."""

    incumbent: Arm
    candidate: Arm
    z: float | None
    """The difference of the means in standard errors; None: too few users."""

    @property
    def num_scored(self) -> int:
        return self.incumbent.num_scored + self.candidate.num_scored

    @property
    def difference(self) -> float:
        return self.candidate.mean - self.incumbent.mean


def capped(opinions: Iterable[Opinion], most: int) -> list[Opinion]:
    """The opinions without those of a user beyond the first `most`."""
    counts: Counter[str] = Counter()
    kept: list[Opinion] = []
    for opinion in opinions:
        counts[opinion.user] += 1
        if counts[opinion.user] <= most:
            kept.append(opinion)
    return kept


def arm_of(opinions: Sequence[Opinion]) -> Arm:
    """The mean of opinions, and the mean's variance over users."""
    if not opinions:
        return Arm(0, 0, math.nan, math.nan)
    by_user: defaultdict[str, list[float]] = defaultdict(list)
    for opinion in opinions:
        by_user[opinion.user].append(opinion.reward)
    number, users = len(opinions), len(by_user)
    mean = math.fsum(opinion.reward for opinion in opinions) / number
    if users < 2:
        return Arm(number, users, mean, math.nan)
    squares = math.fsum((math.fsum(rewards) - mean * len(rewards)) ** 2 for rewards in by_user.values())
    return Arm(number, users, mean, users / (users - 1) * squares / number**2)


def look(incumbent: Sequence[Opinion], candidate: Sequence[Opinion]) -> Look:
    arms = arm_of(incumbent), arm_of(candidate)
    if min(arm.num_users for arm in arms) < MIN_USERS:
        return Look(*arms, None)
    difference = arms[1].mean - arms[0].mean
    error = math.sqrt(arms[0].variance + arms[1].variance)
    if error == 0.0:  # all users of a step agree
        return Look(*arms, 0.0 if difference == 0.0 else math.copysign(math.inf, difference))
    return Look(*arms, difference / error)


def due_looks(num_scored: int, policy: Policy) -> int:
    """The looks for which there are enough scores."""
    return sum(num_scored >= needed for needed in policy.looks)


def is_promoted(seen: Look, num_due: int, policy: Policy) -> bool | None:
    """Whether the candidate serves from now on; None: a later look decides."""
    if seen.z is None:
        return None
    if num_due == len(policy.looks):
        return seen.z > 0.0
    return seen.z > 0.0 if abs(seen.z) > policy.z else None
