"""`retry`: a decorator that calls a function again after it fails. It is for unreliable tools and judges in rollouts;
calls to the server reconnect without it (see `connection`)."""

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from art.errors import error_text

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: tuple[type[BaseException], ...] = (Exception,),
    on_retry: Callable[[BaseException, int], None] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that calls a function, plain or async, up to `max_attempts` times.

    It waits `delay` seconds after the first failure, and `backoff_factor` times longer after each further one. The last
    failure is raised. `on_retry(error, attempt)` is called before each wait. Cancellation, KeyboardInterrupt and
    SystemExit are never retried.
    """
    if max_attempts < 1:
        raise ValueError(f"max_attempts must be at least 1, not {max_attempts}")

    def seconds_before_next(name: str, error: BaseException, attempt: int) -> float:
        if attempt == max_attempts or isinstance(error, (asyncio.CancelledError, KeyboardInterrupt, SystemExit)):
            raise error
        shown = error_text(error, repr)
        logger.warning("%s failed (attempt %d of %d): %s", name, attempt, max_attempts, shown)
        if on_retry is not None:
            on_retry(error, attempt)
        return delay * backoff_factor ** (attempt - 1)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = getattr(function, "__qualname__", repr(function))  # partials have no __qualname__

        @functools.wraps(function)
        async def call_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            for attempt in range(1, max_attempts + 1):
                try:
                    return await cast(Any, function(*args, **kwargs))
                except exceptions as error:
                    await asyncio.sleep(seconds_before_next(name, error, attempt))

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for attempt in range(1, max_attempts + 1):
                try:
                    return function(*args, **kwargs)
                except exceptions as error:
                    time.sleep(seconds_before_next(name, error, attempt))
            raise AssertionError("the last attempt returns or raises")

        return cast(Callable[P, R], call_async if inspect.iscoroutinefunction(function) else call)

    return decorate
