"""Runs a user's code within a time limit: async code in a separate task, plain code in a separate thread.

Code that continues after its limit is left behind. Neither the rollout nor the end of the process waits for such code.
"""

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CLEANUP_SECONDS = 5.0
"""The time after a cancellation in which code can close its connections and end its programs."""


class TimeUp(Exception):
    """The code took longer than its limit."""


async def limited(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """The result of the work. After the limit the work is cancelled, and a result that comes later is dropped.

    Raises:
        TimeUp: the work took longer.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_retrieve)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CLEANUP_SECONDS)
    raise TimeUp(f"longer than {seconds:g} s")


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Reads the failure of work that was left behind. asyncio logs a failure that nobody reads."""
    if not task.cancelled():
        task.exception()


async def in_thread(call: Callable[[], T]) -> T:
    """The result of a plain function, which runs in a thread with this context. The thread is a daemon: at its end Python waits
    for all other threads, and a call that never returns would keep the process."""
    future = concurrent.futures.Future[T]()
    future.set_running_or_notify_cancel()  # a running future accepts a result that nobody awaits any longer
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(call)
        except StopIteration as error:  # no future can raise this error
            future.set_exception(RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:  # of any kind: it is the user's code, and is raised where the result is awaited
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="rollout", daemon=True).start()
    return await asyncio.wrap_future(future)
