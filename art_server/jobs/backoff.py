"""What happens to a job after an attempt that ended with an error: it is tried again, later each time, or it fails."""

import sqlite3
from collections.abc import Mapping

from pydantic import ValidationError

from art_protocol.wire import ErrorDetail
from art_server.errors import ServerError
from art_server.jobs.trainer_process import TrainerError

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 60.0
"""The pause before the next attempt, which doubles with each attempt."""
MAX_DOUBTFUL = 5
"""A job is tried again five times after the death of the trainer's process or an unforeseen error; the sixth fails the job.
The cause may be the job; or another program's memory or an operator, and then the cause may pass within minutes."""
MAX_DEATHS_AT_FULL_SIZE = 2
"""The kernel kills a process that takes too much memory, but two deaths may have another reason."""
DIED, UNFORESEEN = "trainer_died", "internal_error"


def pause_after(error: ErrorDetail, attempts: Mapping[str, int], *, is_committed: bool = False) -> float | None:
    """Seconds until the next attempt at a job; None if the job fails. `attempts` counts the attempts that ended with an
    error, this attempt included, by the error's code. Which errors of the trainer are retryable is decided where they are
    raised (`trainer/tasks.py`): no memory for the smallest part of a step fails the job at once. A job whose step
    `is_committed` is tried again until the job is finished."""
    is_doubtful = error.code in (DIED, UNFORESEEN)
    num_doubtful = attempts.get(DIED, 0) + attempts.get(UNFORESEEN, 0)
    is_at_fault = num_doubtful > MAX_DOUBTFUL if is_doubtful else not error.retryable
    if is_at_fault and not is_committed:
        return None
    # A job whose step is committed has no last attempt, and a float times 2**1024 is an OverflowError.
    doublings = min(sum(attempts.values()) - 1, 10)
    return min(FIRST_PAUSE_SECONDS * 2**doublings, LONGEST_PAUSE_SECONDS)


def budget_divisor(attempts: Mapping[str, int]) -> int:
    """The number by which the next attempt divides the tokens of a micro-batch."""
    return 2 ** max(0, attempts.get(DIED, 0) - MAX_DEATHS_AT_FULL_SIZE)


def error_detail(error: Exception) -> ErrorDetail:
    """An exception as the error of a job's row. The error is `retryable` if the cause lies outside the job and passes: in
    the engine, a disk, a database or the device. After the trainer's death the cause may lie there."""
    code, retryable, message = UNFORESEEN, False, f"{type(error).__name__}: {error}"
    if isinstance(error, ServerError | TrainerError):
        code, retryable, message = error.code, error.retryable, error.message
    elif isinstance(error, OSError | sqlite3.Error):
        code, retryable = "system_error", True
    elif isinstance(error, ValidationError):
        code = "unreadable_job"
    return ErrorDetail(message=message, code=code, type="server_error", retryable=retryable)
