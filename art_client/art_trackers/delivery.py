"""Delivery to a tracker: a bounded queue, and a thread that empties it.

Whatever the tracker does, the caller does not wait, and there is one warning. When the queue is full the oldest item is
dropped and counted.
"""

import atexit
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger("art.trackers")

_PASSWORD = re.compile(r"://[^/@\s]+@")
"""User and password in the address of a tracker, which its library's errors quote."""

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

MAX_QUEUED = 32
"""Steps. A tracker that is that far behind will not catch up, and a program's records hold their trajectories."""

LAST_SECONDS = 0.5
"""At the program's end, for a thread that did not finish in time."""


class Sink(Protocol[T_contra]):
    """A tracker, as its thread uses it. Its methods block, and raise what its library raises."""

    def send(self, items: Sequence[T_contra], /) -> None: ...

    def close(self) -> None: ...


class Delivery(Generic[T]):
    """Sends items to one tracker, in its own thread, at most `max_batch` at a time and `pause_seconds` after the first.

    `open_sink` is called in the thread. `after_send` follows each batch.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink[T]],
        *,
        max_queued: int = MAX_QUEUED,
        max_batch: int = 1,
        pause_seconds: float = 0.0,
        after_send: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.open_sink, self.after_send = open_sink, after_send
        self.max_queued, self.max_batch, self.pause_seconds = max_queued, max_batch, pause_seconds
        self.num_lost = 0
        """Items that did not reach the tracker."""
        self._has_warned = False
        self._lock = threading.Lock()
        self._worker: _Worker[T] | None = None
        self._ending: _Worker[T] | None = None

    def put(self, item: T) -> None:
        """Queues an item."""
        try:
            with self._lock:
                if self._worker is None or not self._worker.is_alive():
                    worker = _Worker(self)
                    worker.start()
                    # Runs after the hooks of the library, which the thread imports later: a thread that they let go of
                    # ends before Python does. Killed in the library's C code, it would abort the process.
                    atexit.register(worker.join, LAST_SECONDS)
                    self._worker = worker
                num_dropped = self._worker.put(item)
        except RuntimeError:  # Python starts no thread while it shuts down
            self.lose(1, "got a report after the program's end")
            return
        if num_dropped:
            self.lose(num_dropped, f"is more than {self.max_queued} reports behind, which are lost")

    def finish(self) -> None:
        """Lets the thread end when it has sent what is queued. A later item starts another thread."""
        with self._lock:
            self._ending, self._worker = self._worker, None
        if self._ending is not None:
            self._ending.finish()

    def join(self, limit_seconds: float) -> None:
        """Waits for the end of the thread that `finish` ended, at most for the limit."""
        if self._ending is None:
            return
        self._ending.join(max(0.0, limit_seconds))
        if self._ending.is_alive():
            self.lose(self._ending.abandon(), "does not finish in time, and the program goes on")
        if self.num_lost:
            logger.info("tracker %s: %d reports were lost", self.name, self.num_lost)

    def lose(self, number: int, reason: str) -> None:
        """Counts items as lost, and warns if this is the first time."""
        self.num_lost += number
        self.warn(reason)

    def warn(self, reason: str) -> None:
        """Logs the tracker's only warning."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "tracker %s: %.500s. Nothing else depends on it; this is its only warning",
                self.name,
                _PASSWORD.sub("://***@", reason),
            )


class _Worker(threading.Thread, Generic[T]):
    """The thread of one delivery. A daemon: a tracker that hangs does not keep the program from ending."""

    def __init__(self, delivery: Delivery[T]) -> None:
        super().__init__(name=f"tracker {delivery.name}", daemon=True)
        self._delivery = delivery
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._is_ending = self._is_abandoned = False
        self._num_sending = 0

    def abandon(self) -> int:
        """Lets the thread end as soon as the tracker lets go of it. Returns the number of items that it has not sent."""
        with self._changed:
            self._is_abandoned = True
            num_left = len(self._items) + self._num_sending
            self._items.clear()
            return num_left

    def put(self, item: T) -> int:
        """Queues an item. Returns the number of items that were dropped for it."""
        with self._changed:
            num_dropped = 0
            if len(self._items) >= self._delivery.max_queued:
                self._items.popleft()
                num_dropped = 1
            self._items.append(item)
            self._changed.notify()
            return num_dropped

    def finish(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify()

    def run(self) -> None:
        sink: Sink[T] | None = None
        while batch := self._take():
            try:
                if sink is None:
                    sink = self._delivery.open_sink()
                sink.send(batch)
                self._delivery.after_send()
            except Exception as error:  # whatever a tracker raises
                if not self._is_abandoned:
                    self._delivery.lose(len(batch), f"failed ({type(error).__name__}: {error})")
        try:
            if sink is not None and not self._is_abandoned:
                sink.close()
        except Exception as error:  # whatever a tracker raises
            self._delivery.warn(f"failed at its end ({type(error).__name__}: {error})")

    def _take(self) -> list[T]:
        """The next items; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._is_ending)
            self._changed.wait_for(lambda: self._is_ending, self._delivery.pause_seconds)
            self._num_sending = min(self._delivery.max_batch, len(self._items))
            return [self._items.popleft() for _ in range(self._num_sending)]
