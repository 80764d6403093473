"""What happens to a job after each kind of error, by the attempts that it has had."""

import errno
import sqlite3
from collections import Counter

import pytest

from art_server.errors import Conflict, StorageFull, Unavailable
from art_server.jobs.backoff import MAX_DOUBTFUL, budget_divisor, error_detail, pause_after
from art_server.jobs.trainer_process import RankLost, TrainerDied, TrainerError
from art_server.shared.trainer_messages import UNLIKE_RANKS

TEMPORARY: list[Exception] = [
    StorageFull("no room", code="no_disk_space"),
    TrainerError("no_disk_space", "os error 28", retryable=True),
    TrainerError(UNLIKE_RANKS, "two machines differ", retryable=True),
    RankLost("host a was lost: its connection ended"),
    TrainerError("other_rank_failed", "Connection reset by peer", retryable=True),
    Unavailable("it starts", code="engine_starting"),
    OSError(errno.EROFS, "Read-only file system"),
    sqlite3.OperationalError("disk I/O error"),
]
DOUBTFUL: list[Exception] = [TrainerDied("killed"), KeyError("what")]
OWN: list[Exception] = [
    TrainerError("non_finite", "the loss is NaN"),
    Conflict("another base model", code="wrong_base_model"),
]


def pauses(error: Exception, num: int, before: Counter[str] | None = None) -> list[float | None]:
    """After each of a job's next attempts, which all end with the error."""
    detail = error_detail(error)
    attempts = [Counter({detail.code: n}) + (before or Counter()) for n in range(1, num + 1)]
    return [pause_after(detail, counts) for counts in attempts]


@pytest.mark.parametrize("error", TEMPORARY, ids=repr)
def test_a_job_waits_longer_and_longer_for_what_is_not_its_fault(error: Exception) -> None:
    assert pauses(error, 6) == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert pauses(error, 10_000)[-1] == 60.0
    assert error_detail(error).retryable


@pytest.mark.parametrize("error", DOUBTFUL, ids=repr)
def test_a_job_that_may_be_the_cause_fails_in_the_end(error: Exception) -> None:
    assert pauses(error, MAX_DOUBTFUL + 1) == [5.0, 10.0, 20.0, 40.0, 60.0, None]
    other = next(doubtful for doubtful in DOUBTFUL if doubtful is not error)
    before = Counter({error_detail(other).code: MAX_DOUBTFUL - 1})
    assert [pause is None for pause in pauses(error, 2, before)] == [False, True]
    before = Counter({"no_disk_space": 100})
    assert None not in pauses(error, MAX_DOUBTFUL, before), "what was not its fault does not count"


@pytest.mark.parametrize("error", OWN, ids=repr)
def test_a_job_s_own_fault_ends_it_at_once(error: Exception) -> None:
    detail = error_detail(error)
    assert pauses(error, 1) == [None] and not detail.retryable
    assert pause_after(detail, {detail.code: 2}, is_committed=True) == 10.0, "its step exists"


def test_the_third_death_and_each_after_it_halve_the_tokens() -> None:
    deaths = [Counter(trainer_died=number, internal_error=3, connection_lost=9) for number in range(6)]
    assert [budget_divisor(counts) for counts in deaths] == [1, 1, 1, 2, 4, 8]
