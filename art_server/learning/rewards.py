"""What the scores of an answer or a session are worth: their reward, and which of their texts teach."""

import math
import statistics
from collections.abc import Iterable, Sequence

from art_protocol.learning import Policy
from art_server.learning.scores import WaitingScore

DAY, HOUR = 86400.0, 3600.0


def reward_of(scores: Iterable[WaitingScore], policy: Policy) -> float:
    """The reward of scores: for each name the mean of its values, times the name's weight, summed. 0 without values."""
    values: dict[str, list[float]] = {}
    for score in scores:
        if score.value is not None:
            values.setdefault(score.name, []).append(score.value)
    return math.fsum(policy.names[name].weight * statistics.fmean(of_name) for name, of_name in values.items())


def teachers_of(scores: Sequence[WaitingScore], policy: Policy) -> list[WaitingScore]:
    """The scores of one answer or session whose texts teach. A correction does. A comment says what was wrong, so it teaches if
    its score is not the best; without a value of its own, if any score of the answer is not the best, or none has a value."""
    if policy.text == "off" or not any(score.teaches for score in scores):
        return []
    are_best = [is_best(score, policy) for score in scores if score.value is not None]
    is_faulty = not are_best or not all(are_best)
    teachers: list[WaitingScore] = []
    for score in scores:
        has_fault = is_faulty if score.value is None else not is_best(score, policy)
        if score.teaches == "correction" or (score.teaches == "comment" and has_fault):
            teachers.append(score)
    return teachers


def is_best(score: WaitingScore, policy: Policy) -> bool:
    """Whether no value of the score's name gives a higher reward."""
    name = policy.names[score.name]
    return score.value == (name.high if name.weight >= 0 else name.low)
