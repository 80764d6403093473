"""`contained`: a block around code of the program, such as a rollout, a reward or a hook. What ends this code is its
failure, and never the end of the program.

Command lines (argparse, click) end with SystemExit, and libraries raise other BaseExceptions: pytest's outcomes, a panic of
a Rust library. asyncio ends its loop at a SystemExit in any task, so a SystemExit in a task that the code starts becomes a
failure, too. The program's own end passes: Ctrl-C, and the SystemExit of a signal's handler, which Python runs inside any
code.
"""

import asyncio
import signal
import traceback as tracebacks
from asyncio import AbstractEventLoop
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Self, cast

from art.errors import error_text

_is_contained: ContextVar[bool] = ContextVar("is_contained", default=False)
"""Whether contained code runs here. A task inherits the value from the code that starts the task."""


class contained:
    """A `with` block that raises a RuntimeError in place of each exception of its code that is no Exception, except for the
    program's own cancellation and end. `what` names the code in the message: "the rollout"."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> Self:
        self._task = _current_task()
        self._tasks = None if self._task is None else _TaskFactory.installed(self._task.get_loop())
        self._token: Token[bool] = _is_contained.set(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._tasks is not None:
            self._tasks.release()
        if isinstance(error, GeneratorExit) and _current_task() is not self._task:
            return  # Python closes the coroutine with the block, perhaps in a context where the token is invalid
        _is_contained.reset(self._token)
        if error is None or isinstance(error, Exception) or _is_end_of_program(error):
            return
        if _has(error, asyncio.CancelledError):
            # A cancellation from outside is counted on the task. A CancelledError that the code raised by itself is not.
            if self._task is None or self._task.cancelling():
                return
            raise RuntimeError(f"{self._what} was cancelled, but not by its gather") from error
        raise _as_failure(self._what, error) from error


def _as_failure(what: str, error: BaseException) -> RuntimeError:
    remedy = ", as a command line does: call the function behind it" if isinstance(error, SystemExit) else ""
    return RuntimeError(f"{what} ended with {error_text(error, repr)}{remedy}")


def _is_end_of_program(error: BaseException) -> bool:
    """Whether the error is Ctrl-C, or a SystemExit that a signal's handler raised."""
    if _has(error, KeyboardInterrupt):
        return True
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions = [getattr(handler, "__func__", handler) for handler in handlers]  # a handler may be a bound method
    codes = {getattr(function, "__code__", None) for function in functions} - {None}
    frames = tracebacks.walk_tb(error.__traceback__)
    return isinstance(error, SystemExit) and any(frame.f_code in codes for frame, _ in frames)


def _has(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether an exception, or a member of a group of exceptions, is of a kind."""
    if isinstance(error, BaseExceptionGroup):
        return cast("BaseExceptionGroup[BaseException]", error).subgroup(kind) is not None
    return isinstance(error, kind)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None


class _TaskFactory:
    """The task factory of a loop while contained code runs in it."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._before: Callable[..., Any] | None = loop.get_task_factory()  # Any: what the program has set
        self._num_blocks = 0

    @classmethod
    def installed(cls, loop: AbstractEventLoop) -> "_TaskFactory":
        """The loop's factory, installed if the loop has none. `release` removes the factory at the end of the last block."""
        current = loop.get_task_factory()
        factory = current if isinstance(current, _TaskFactory) else cls(loop)
        factory._num_blocks += 1
        loop.set_task_factory(factory)
        return factory

    def release(self) -> None:
        self._num_blocks -= 1
        if not self._num_blocks and self._loop.get_task_factory() is self:
            self._loop.set_task_factory(self._before)

    def __call__(
        self, loop: AbstractEventLoop, coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
    ) -> Any:
        if _is_contained.get() and isinstance(coroutine, Coroutine):
            coroutine = _WithoutExit(coroutine)
        if self._before is None:
            # As asyncio's `create_task` does in a loop without a factory.
            return asyncio.Task(coroutine, loop=loop, **options)
        return self._before(loop, coroutine, **options)


@contextmanager
def _exit_as_failure() -> Generator[None]:
    try:
        yield
    except SystemExit as error:
        if _is_end_of_program(error):
            raise
        raise _as_failure("a task", error) from error


class _WithoutExit(Coroutine[Any, Any, Any]):
    """A coroutine that raises an Exception in place of a SystemExit."""

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def send(self, value: Any) -> Any:
        with _exit_as_failure():
            return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        with _exit_as_failure():
            return self._inner.throw(*error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # asyncio reads `__qualname__` and `cr_frame` to print a task
