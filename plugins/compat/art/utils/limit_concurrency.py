"""`limit_concurrency`: a decorator that bounds how many calls of an async function run at a time."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class _Slots:
    """The slots of a key, and the calls that hold or await a slot."""

    free: asyncio.Semaphore
    num_calls: int = 0


def limit_concurrency(
    n: int, derive_key: Callable[..., Hashable] | None = None
) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
    """At most `n` calls run at a time, in each event loop. `derive_key` computes a key from a call's arguments; with such a
    function, at most `n` calls run at a time for each key."""
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")

    def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
        loops = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, _Slots]]()

        @functools.wraps(function)
        async def limited(*args: P.args, **kwargs: P.kwargs) -> R:
            key = None if derive_key is None else derive_key(*args, **kwargs)
            of_keys = loops.setdefault(asyncio.get_running_loop(), {})
            slots = of_keys.setdefault(key, _Slots(asyncio.Semaphore(n)))
            slots.num_calls += 1
            try:
                async with slots.free:
                    return await function(*args, **kwargs)
            finally:
                slots.num_calls -= 1
                if slots.num_calls == 0:
                    del of_keys[key]  # there may be as many keys as calls

        return limited

    return decorate
