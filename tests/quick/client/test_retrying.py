import asyncio
import time

import pytest

import art


class Flaky:
    """Fails so many times, then answers."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.num_calls = 0

    def call(self, value: int) -> int:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return value


def test_sync_function_is_called_again_after_each_failure():
    flaky = Flaky(ValueError("a"), ValueError("b"))
    seen = []
    retried = art.retry(
        max_attempts=3,
        delay=0.001,
        backoff_factor=1.5,
        exceptions=(ValueError,),
        on_retry=lambda error, attempt: seen.append((str(error), attempt)),
    )
    assert retried(flaky.call)(7) == 7
    assert flaky.num_calls == 3
    assert seen == [("a", 1), ("b", 2)]


@pytest.mark.anyio
async def test_async_function_is_called_again_after_each_failure():
    flaky = Flaky(ValueError("a"))

    @art.retry(delay=0.001)
    async def call(value: int) -> int:
        return flaky.call(value)

    assert asyncio.iscoroutinefunction(call)
    assert await call(7) == 7
    assert flaky.num_calls == 2


def test_last_failure_is_raised():
    failures = [ValueError(), ValueError(), ValueError()]
    flaky = Flaky(*failures)
    with pytest.raises(ValueError) as caught:
        art.retry(max_attempts=2, delay=0.001)(flaky.call)(7)
    assert caught.value is failures[1] and flaky.num_calls == 2


def test_other_exceptions_are_not_retried():
    flaky = Flaky(KeyError("a"))
    with pytest.raises(KeyError):
        art.retry(exceptions=(ValueError,))(flaky.call)(7)
    assert flaky.num_calls == 1


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt(), SystemExit()])
def test_cancellation_and_interrupts_pass_even_when_everything_is_retried(error: BaseException):
    flaky = Flaky(error)
    with pytest.raises(type(error)):
        art.retry(exceptions=(BaseException,), delay=0.001)(flaky.call)(7)
    assert flaky.num_calls == 1


def test_waits_grow_by_the_factor(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    flaky = Flaky(ValueError(), ValueError(), ValueError())
    art.retry(4, delay=0.5, backoff_factor=4.0)(flaky.call)(7)
    assert waits == [0.5, 2.0, 8.0]


def test_no_attempt_at_all_is_refused():
    with pytest.raises(ValueError, match="max_attempts"):
        art.retry(max_attempts=0)
