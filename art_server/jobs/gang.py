"""The trainer's processes from the server's side: one, or several ranks that train each job together (`trainer/gang.py`)."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from art_server.jobs.budgets import Budgets
from art_server.jobs.trainer_process import TrainerDied, TrainerError, TrainerProcess
from art_server.process.children import Children
from art_server.process.shared.trainer_messages import (
    UNLIKE_RANKS,
    CheckTask,
    Done,
    InitTask,
    Progress,
    Task,
    TrainTask,
    WorkerConfig,
)

LAST_SECONDS = 5.0
"""How long the others may take to answer when a rank has failed. All ranks end a job alike, or they wait for one that does
not come."""
IDLE_SECONDS = 5.0
"""Ranks that compute nothing for so long in the middle of a step wait for one that hangs or is stopped. One that computes is not
waited for with a limit: a micro-batch may take minutes."""
IDLE_SHARE = 0.02
"""Of a core, which ranks use that only wait."""
DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}
COMPUTING = ("train", "forward")
"""Phases in which the ranks compute."""
IN_STEP = ("cancelled", "non_finite", "gap_too_large", "out_of_memory")
"""Errors that all ranks have alike, so that they can train the next job. After others they are ended."""


class Lender(Protocol):
    """Has ranks on other machines (`plugins/cluster`)."""

    def ranks(self) -> Sequence[TrainerProcess]:
        """Those that are there now; an equal list as long as nothing has changed."""
        ...

    async def meeting(self, first: TrainerProcess) -> str:
        """An address at which ranks of several machines find each other: `first` opens it."""
        ...


class Gang:
    """All ranks: the first writes the files and reports progress.

    They are started together, and if one ends or fails by itself all are ended: none of them holds anything that the job does
    not repeat. Each job has the ranks that are there when it begins.
    """

    def __init__(
        self,
        log_dir: Path,
        environments: Sequence[Mapping[str, str]],
        children: Children | None = None,
        meeting: Path | None = None,
        name: str = "trainer",
        budgets: Budgets | None = None,
    ) -> None:
        """One rank on this machine for each of the environments. Several of them meet in the file `meeting`. `name` is that of
        their logs. `budgets` are those that earlier jobs have learned; None: nothing is stored."""
        self._own = [
            TrainerProcess((), log_dir / f"{name}{f'-{rank}' * (rank > 0)}.log", environment, children)
            for rank, environment in enumerate(environments)
        ]
        self.ranks = list(self._own)
        self.lender: Lender | None = None
        """None: there are no ranks but those of this machine."""
        self._worker: WorkerConfig | None = None
        self._budgets = budgets
        self._meeting = meeting
        self._have_met = False
        self._turn = asyncio.Lock()
        self._phase = ""
        """What the first rank does."""

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def _all_run(self) -> bool:
        return all(each.is_running for each in self.ranks)

    @property
    def pids(self) -> dict[str, int | None]:
        """The process of each rank on this machine by name; None while it does not run."""
        return {each.name: each.pid for each in self._own}

    def use(self, config: WorkerConfig) -> None:
        """Sets how the ranks work; the first task starts them."""
        self._worker = config
        self._use(str(self._meeting))

    def _use(self, meeting: str) -> None:
        for rank, each in enumerate(self.ranks):
            each.budgets = self._budgets
            update = {"rank": rank, "num_ranks": self.num_ranks, "meeting": meeting}
            if self._worker is not None:
                each.use(self._worker.model_copy(update=update) if self.num_ranks > 1 else self._worker)

    async def _gather(self) -> None:
        """Takes the ranks that are there.

        Raises:
            TrainerError: there is none.
        """
        if self.lender is None:
            return
        there = [*self._own, *self.lender.ranks()]
        if there != self.ranks:
            await self.stop()
            self.ranks = there
            self._use(str(self._meeting))
        if not there:
            raise TrainerError(
                "no_rank", "no machine has joined that offers a rank: start `art-server host` there", True
            )

    def _check_devices(self) -> None:
        """Checks that all ranks compute on one kind of device, before they are started.

        Raises:
            TrainerError: they do not.
        """
        first = self.ranks[0]
        for rank in self.ranks:
            if rank.device != first.device:
                raise TrainerError(
                    UNLIKE_RANKS,
                    f"a rank on {first.machine} computes on {DEVICES[first.device]}, one on {rank.machine} on "
                    f"{DEVICES[rank.device]}, and they cannot train a job together: start one of both with --ranks 0",
                    retryable=True,
                )

    async def _prepare(self) -> None:
        """Sets where the ranks meet, if they have not met."""
        if self._have_met and not self._all_run():
            await self.stop()
        if self._have_met:
            return
        if self.lender is not None and self.ranks != self._own:
            self._use(await self.lender.meeting(self.ranks[0]))
        else:
            assert self._meeting is not None, "several ranks need a place to meet"
            self._meeting.unlink(missing_ok=True)
        self._have_met = True

    async def run(
        self,
        task: Task,
        on_progress: Callable[[Progress], Awaitable[None]] | None = None,
        batch: bytes | None = None,
    ) -> Done:
        """As `TrainerProcess.run`, by all ranks."""
        async with self._turn:
            await self._gather()
            if isinstance(task, TrainTask) and self._budgets is not None:
                task = task.model_copy(update={"budgets": await asyncio.to_thread(self._budgets.read)})
            if self.num_ranks == 1 or isinstance(task, InitTask | CheckTask):
                return await self.ranks[0].run(task, on_progress, batch)
            return await self._run_together(task, on_progress, batch)

    async def _run_together(
        self, task: Task, on_progress: Callable[[Progress], Awaitable[None]] | None, batch: bytes | None
    ) -> Done:
        self._check_devices()
        await self._prepare()
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self.stop)

            async def note(progress: Progress) -> None:
                self._phase = progress.phase
                if on_progress is not None:
                    await on_progress(progress)

            self._phase = ""
            first, *others = self.ranks
            leading = asyncio.create_task(first.run(task, note, batch))
            runs = [leading, *(asyncio.create_task(each.run(task, None, batch)) for each in others)]
            error = await _first_error(runs, asyncio.create_task(self._watch()))
            if error is None or (error.code in IN_STEP and self._all_run()):
                on_failure.pop_all()
        if error is not None:
            raise error
        return leading.result()

    async def _watch(self) -> None:
        """Raises TrainerDied when no rank computes in the middle of a step. Without /proc it never does."""
        used, since = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(IDLE_SECONDS / 5)
            now = sum(each.cpu_seconds for each in self.ranks)
            passed = time.monotonic() - since
            is_busy = now - used > IDLE_SHARE * passed * self.num_ranks
            if not self._phase.startswith(COMPUTING) or not self._all_run() or is_busy:
                used, since = now, time.monotonic()
            elif passed > IDLE_SECONDS:
                raise TrainerDied(f"no rank has computed for {passed:.0f} s: one of them hangs or is stopped")

    def cancel(self) -> None:
        """As `TrainerProcess.cancel`, on all ranks."""
        for each in self.ranks:
            each.cancel()

    async def stop(self) -> None:
        """Ends all ranks; a running task ends with TrainerDied."""
        self._have_met = False
        for each in self.ranks:
            await each.stop()


async def _first_error(runs: Sequence[asyncio.Task[Done]], watch: asyncio.Task[None]) -> TrainerError | None:
    """The reason why a task failed on some rank, or what the watch found; None if all have done it. No run is left."""
    try:
        pending: set[asyncio.Task[Any]] = {*runs, watch}
        while pending > {watch}:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(each.exception() for each in done):
                break
        if not watch.done() and (rest := pending - {watch}):
            await asyncio.wait(rest, timeout=LAST_SECONDS)
    finally:  # a run that is cancelled kills its process
        for each in (*runs, watch):
            each.cancel()
        await asyncio.wait([*runs, watch])
    errors: list[TrainerError] = []
    for each in (watch, *runs):
        if each.cancelled() and each is watch:
            continue
        if each.cancelled():
            errors.append(TrainerDied("a rank did not answer after another one had failed"))
        elif error := each.exception():
            if not isinstance(error, TrainerError):
                raise error
            errors.append(error)
    # What the ranks say of each other is the least likely reason, and a death more likely than a sum that broke.
    return min(errors, key=_rank_of_reason, default=None)


def _rank_of_reason(error: TrainerError) -> int:
    if error.code in (*IN_STEP, UNLIKE_RANKS):
        return 0
    return {"trainer_died": 1, "trainer_error": 2, "other_rank_failed": 4}.get(error.code, 3)
