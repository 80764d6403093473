"""`Job`: a train call that the server has accepted. `model.submit` returns it."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from art.types import TrainResult


class Job:
    """A train call that the server has accepted. The job ends without this program as well. `await job` waits until the
    new step serves and returns the `TrainResult`; any number of tasks may await the job, also after its end.

    Raises, when it is awaited:
        ArtJobError: the job failed or was cancelled.
        ArtConnectionError: no server answers in time.
    """

    def __init__(self, job_id: str, follow: Callable[[], Awaitable[TrainResult]]) -> None:
        self.job_id = job_id
        """The job's name in `art jobs` and `/api/jobs`."""
        self._follow = follow
        self._lock = asyncio.Lock()
        """Lets a single task follow the job. Other tasks that await the job wait for this lock."""
        self._result: TrainResult | None = None

    def __await__(self) -> Generator[Any, None, TrainResult]:
        return self._wait().__await__()

    def __repr__(self) -> str:
        return f"Job('{self.job_id}')" if self._result is None else f"Job('{self.job_id}', {self._result})"

    async def _wait(self) -> TrainResult:
        async with self._lock:
            if self._result is None:
                self._result = await self._follow()
        return self._result
