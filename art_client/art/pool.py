"""`RolloutPool`: runs rollouts with bounded concurrency, shows a progress bar, and stops after too many failures.

`gather` opens a pool. A `TrajectoryGroup` that is awaited inside it, also by a coroutine of the caller, finds the pool
through `current_pool`. The module `trajectories` checks what a rollout returns.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from art.bars import make_bar
from art.blocking import watched
from art.contained import contained
from art.errors import error_text
from art.tracebacks import shorten
from art_protocol.signal import to_finite

if TYPE_CHECKING:
    from tqdm.auto import tqdm

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_MAX_CONCURRENT_ROLLOUTS = 256
"""vLLM's default number of concurrent sequences: more rollouts would only wait there."""

DEFAULT_MAX_EXCEPTIONS = 0.1
"""A tenth of the rollouts. Some fail in a long run, by a tool or a prompt that is too long. A fault of the program or
the server fails most of them."""

TICK_SECONDS = 1.0
"""The time between two displays of the bar while no rollout ends."""
WITHOUT_ESTIMATE = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
"""The bar before two rollouts have ended: rollouts run at the same time, so the first says nothing about the time that is left."""

TOKENS = "completion_tokens"
"""The metric with the number of sampled tokens."""

current_pool: ContextVar["RolloutPool | None"] = ContextVar("current_pool", default=None)


def is_share(max_exceptions: float) -> bool:
    """Whether a limit of failures is a share: 0.1 and 1.0 are, the count 1 is not."""
    return isinstance(max_exceptions, float) and 0 < max_exceptions <= 1


def num_tolerated(max_exceptions: float, num_rollouts: int) -> float:
    """How many of the rollouts may fail. A float up to 1.0 is a share of the rollouts (1.0: all), an int a count."""
    return max_exceptions * num_rollouts if is_share(max_exceptions) else max_exceptions


class Finished(Protocol):
    """The part of a trajectory that the progress bar shows."""

    reward: float
    metrics: dict[str, float | int | bool]

    def num_sampled_tokens(self) -> int: ...


class RolloutPool:
    """The rollouts of one gather call. Groups that are awaited inside the pool's `with` block run in the pool."""

    def __init__(
        self,
        *,
        desc: str | None = None,
        max_concurrent: int = DEFAULT_MAX_CONCURRENT_ROLLOUTS,
        max_exceptions: float = math.inf,
        max_metrics: int | None = None,
        show_total_tokens: bool = False,
        of_failed: str | None = "They have no reward and are not trained",
    ) -> None:
        """`of_failed` says what failed rollouts lack; None: the caller tells of failures."""
        if max_concurrent < 1:
            raise ValueError(f"max_concurrent_rollouts must be at least 1, not {max_concurrent}")
        if not max_exceptions >= 0:
            raise ValueError(f"max_exceptions must be 0 or more, not {max_exceptions}")
        self._slots = asyncio.Semaphore(max_concurrent)
        self._max_exceptions = max_exceptions
        self._num_expected = 0
        self._num_unresolved = 0
        """Coroutines of groups. A coroutine counts as one rollout until it returns its group."""
        self._largest_group = 1
        self._failed: Counter[str] = Counter()
        """Failed rollouts, by the type of their exception."""
        self._num_running = 0
        self._first_error: BaseException | None = None
        self._first_traceback: TracebackType | None = None
        """The traceback of the first error before every group raises the error again, which adds frames each time."""
        self._counted: dict[int, Finished] = {}  # by id(): equal trajectories count separately
        self._rewards: dict[str, _Mean] = {}
        """By name: "reward", or with a label "reward@30"."""
        self._means: dict[str, _Mean] = {}
        self._max_metrics = max_metrics
        self._show_total_tokens = show_total_tokens
        self._of_failed = of_failed
        self._bar = make_bar(desc=desc, total=0, disable=desc is None, bar_format=WITHOUT_ESTIMATE)
        self._ticks: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._token = current_pool.set(self)
        self._watch = watched(RolloutPool.run.__code__)
        self._watch.__enter__()
        if not self._bar.disable:
            self._ticks = asyncio.create_task(self._tick())
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        current_pool.reset(self._token)
        self._watch.__exit__(None, None, None)
        if self._ticks is not None:
            self._ticks.cancel()
        self._update_bar()
        self._bar.close()
        if self._first_error is None:
            return
        kinds = ", ".join(f"{kind} {number}" for kind, number in self._failed.most_common())
        failed = f"{self._num_failed} of {self._num_expected} rollouts failed ({kinds})"
        if error is None:
            if self._of_failed is None:
                return
            logger.warning(
                "%s; the first: %s. %s. The exceptions in the result show where they failed; max_exceptions=0 raises the "
                "first%s",
                failed,
                error_text(self._first_error, repr),
                self._of_failed,
                "".join(f". {note}" for note in getattr(self._first_error, "__notes__", ())),
            )
        elif error is self._first_error:
            whole = self._first_traceback
            logger.debug("the first failure, with all frames", exc_info=(type(error), error, whole))
            shorten(error, whole)
            limit = self._max_exceptions
            unit = "share of the rollouts" if is_share(limit) else "number of rollouts; a share is 0.1 or 1.0"
            error.add_note(f"{failed}; max_exceptions={limit:g} allows no more ({unit})")

    @property
    def _num_failed(self) -> int:
        return self._failed.total()

    @property
    def has_too_many_failures(self) -> bool:
        """Whether more rollouts failed than max_exceptions (`num_tolerated`). A group of unknown size counts as many rollouts as
        the largest group so far."""
        num_rollouts = self._num_expected + self._num_unresolved * (self._largest_group - 1)
        return self._num_failed > num_tolerated(self._max_exceptions, num_rollouts)

    def expect(self, num_rollouts: int) -> None:
        """Adds to the expected number of rollouts, the bar's total."""
        self._num_expected += num_rollouts
        self._largest_group = max(self._largest_group, num_rollouts)
        self._update_bar()

    def expect_groups(self, num_coroutines: int) -> None:
        """Adds coroutines that each give a group of unknown size."""
        self._num_unresolved += num_coroutines
        self._num_expected += num_coroutines
        self._update_bar()

    def resolve_group(self, *, is_failed: bool = False) -> None:
        """Ends a coroutine of `expect_groups`: the rollouts of its group count instead, or the failure of the coroutine."""
        self._num_unresolved -= 1
        if not is_failed:
            self._num_expected -= 1
        self._update_bar()

    async def run(self, rollout: Awaitable[object], check: Callable[[object], T]) -> T | Exception:
        """`check` applied to the rollout's result, or the exception that the rollout or `check` raised. Waits for a free slot.

        Raises:
            Exception: the first error of all rollouts, if there are too many failures.
        """
        async with self._slots:
            # A group that the rollout awaits must not wait for the slot that the rollout occupies.
            token = current_pool.set(None)
            self._num_running += 1
            try:
                with contained("the rollout"):
                    return check(await rollout)
            except Exception as error:
                failure = error
            finally:
                self._num_running -= 1
                current_pool.reset(token)
        self.fail(failure)  # outside the handler, so that the first error keeps its own context
        return failure

    def count(self, trajectory: Finished, label: str = "") -> None:
        """Adds a finished trajectory to the bar. Trajectories with a label have means of their own, such as "reward@30"."""
        self._counted[id(trajectory)] = trajectory
        num_tokens = trajectory.num_sampled_tokens()
        if num_tokens:
            trajectory.metrics.setdefault(TOKENS, num_tokens)
        self._add(self._rewards, f"reward{label}", trajectory.reward)
        for name, value in trajectory.metrics.items():
            self._add(self._means, name if name == TOKENS else f"{name}{label}", value)
        self._update_bar()

    @staticmethod
    def _add(means: "dict[str, _Mean]", name: str, value: object) -> None:
        number = to_finite(value)
        if number is not None:
            means.setdefault(name, _Mean()).add(number)

    def count_unexpected(self, trajectories: Iterable[Finished]) -> None:
        """Adds trajectories that did not run in this pool, from a group that was already complete."""
        for trajectory in trajectories:
            if id(trajectory) not in self._counted:
                self.expect(1)
                self.count(trajectory)

    def fail(self, error: Exception) -> None:
        """Counts a failure.

        Raises:
            Exception: the first error of all rollouts, if there are too many failures.
        """
        self._failed[type(error).__name__] += 1
        if self._first_error is None:
            self._first_error, self._first_traceback = error, error.__traceback__
        self._update_bar()
        self.raise_if_too_many_failures()

    def raise_if_too_many_failures(self) -> None:
        if self.has_too_many_failures and self._first_error is not None:
            raise self._first_error

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._update_bar()
            self._bar.refresh()

    def _update_bar(self) -> None:
        set_total(self._bar, self._num_expected)
        means = dict(self._means)
        shown = {name: reward.mean for name, reward in self._rewards.items()}
        if self._num_failed:
            shown["exceptions"] = self._num_failed
        tokens = means.pop(TOKENS, None)
        if tokens is not None:
            shown[TOKENS] = tokens.total if self._show_total_tokens else tokens.mean
        for name in list(means)[: self._max_metrics]:
            shown[name] = means[name].mean
        running = [f"{self._num_running} running"] if self._num_running else []
        self._bar.set_postfix_str(", ".join([format_numbers(shown)] * bool(shown) + running), refresh=False)
        num_ended = len(self._counted) + self._num_failed
        self._bar.bar_format = WITHOUT_ESTIMATE if num_ended < 2 else None
        self._bar.update(num_ended - self._bar.n)


def set_total(bar: "tqdm[Any]", total: int) -> None:
    """Sets a bar's length. In a notebook only `reset` changes the length."""
    if hasattr(bar, "container") and bar.total != total:
        started = bar.start_t
        bar.reset(total)
        bar.start_t = started
    bar.total = total


def format_numbers(numbers: Mapping[str, float]) -> str:
    """The numbers as text for a progress bar."""
    return ", ".join(f"{name}={number:.3g}" for name, number in numbers.items())


class _Mean:
    def __init__(self) -> None:
        self.total = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        self.total += value
        self._count += 1

    @property
    def mean(self) -> float:
        return self.total / self._count


async def run_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order. The first error cancels the other coroutines and is raised unchanged."""
    try:
        async with asyncio.TaskGroup() as task_group:
            tasks = [task_group.create_task(coroutine) for coroutine in coroutines]
        return [task.result() for task in tasks]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
    raise first  # outside the handler, so that the error keeps its own cause and context


def close_unstarted(rollouts: Iterable[Awaitable[object]]) -> None:
    """Closes coroutines that a cancelled gather never started, so that Python does not warn about them. Cancels tasks,
    which the program has started."""
    for rollout in rollouts:
        if isinstance(rollout, Coroutine):
            rollout.close()
        elif isinstance(rollout, asyncio.Future):
            rollout.cancel()
