"""The trainer's processes from the server's side: one, or several ranks that train each job together. A rank's own view of the gang
is `trainer/gang_view.py`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from art_server.jobs.budgets import Budgets
from art_server.jobs.trainer_process import RankLost, TrainerDied, TrainerError, TrainerProcess, Usage
from art_server.process.place import Place, PlaceFailed, PlaceLost
from art_server.shared.clock import REAL, Clock
from art_server.shared.trainer_messages import (
    UNLIKE_RANKS,
    Done,
    Progress,
    Task,
    TrainTask,
    WorkerConfig,
    difference_of_ranks,
)

LAST_SECONDS = 5.0
"""How long the other ranks may take to answer after a rank has failed, beside the time for which their network may be silent.
Either all ranks end a job alike, or they wait for a rank that does not come."""
IDLE_SECONDS = 5.0
"""Ranks that are seen to compute nothing for this long in the middle of a step wait for a rank that hangs or is stopped. Ranks
of several machines may also wait for the network. There is no limit for a rank that computes: a micro-batch may take minutes."""
IDLE_SHARE = 0.02
"""Share of a core. Ranks that only wait use at most this much."""
DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}
COMPUTING = ("train", "forward")
"""Phases in which the ranks compute."""
IN_STEP = ("cancelled", "non_finite", "gap_too_large", "out_of_memory")
"""Errors that all ranks have alike, so that the ranks can train the next job. After any other error the ranks are ended."""


class Gang:
    """All ranks: the first writes the files and reports progress.

    All ranks are started together. If one rank ends or fails by itself, all ranks are ended: no rank holds anything that the
    job does not repeat. Each job has the ranks that are available when the job begins: the server's own, and the ranks of
    machines that have joined.
    """

    def __init__(
        self,
        *,
        log_dir: Path,
        locations: Sequence[Place],
        cache_dir: Path,
        meeting: Path | None = None,
        name: str = "trainer",
        budgets: Budgets | None = None,
        clock: Clock = REAL,
    ) -> None:
        """One of the server's own ranks at each of the locations. Several of them meet in the file `meeting`. `name` is the
        beginning of the ranks' log names. `budgets` has what earlier jobs learned; None: nothing is stored."""
        self._clock = clock
        self._own = [
            TrainerProcess(
                location=location, log_path=log_dir / log_name(name, number), cache_dir=cache_dir, clock=clock
            )
            for number, location in enumerate(locations)
        ]
        self.joined: list[TrainerProcess] = []
        """The ranks of machines that have joined."""
        self.ranks = list(self._own)
        """The ranks of the newest job."""
        self._worker: WorkerConfig | None = None
        self._budgets = budgets
        self._meeting = meeting
        self._have_met = False
        self._turn = asyncio.Lock()
        self._phase = ""
        """The phase of the first rank's task."""
        self._idleness = Idleness()

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def _all_run(self) -> bool:
        return all(rank.is_running for rank in self.ranks)

    @property
    def pids(self) -> dict[str, int | None]:
        """The process id of each rank on this machine, by the rank's name; None while the rank does not run."""
        return {rank.name: rank.pid for rank in self._own}

    def add(self, ranks: Sequence[TrainerProcess]) -> None:
        """Adds the ranks of a machine, for the next job."""
        self.joined += ranks

    def remove(self, ranks: Sequence[TrainerProcess]) -> None:
        """Removes the ranks of a machine that is lost. The next job has the others."""
        self.joined = [rank for rank in self.joined if rank not in ranks]

    def use(self, config: WorkerConfig) -> None:
        """Sets how the ranks work; the first task starts them."""
        self._worker = config
        self._use(str(self._meeting))

    def _use(self, meeting: str) -> None:
        for number, rank in enumerate(self.ranks):
            rank.budgets = self._budgets
            update = {"rank": number, "num_ranks": self.num_ranks, "meeting": meeting}
            if self._worker is not None:
                rank.use(self._worker.model_copy(update=update) if self.num_ranks > 1 else self._worker)

    async def _gather(self) -> None:
        """Takes the ranks that are available. A lost machine's ranks are not, also before the machine is removed.

        Raises:
            TrainerError: no rank is available.
        """
        available = [*self._own, *(rank for rank in self.joined if not rank.location.lost)]
        if available != self.ranks:
            await self.stop()
            self.ranks = available
            self._use(str(self._meeting))
        if not available:
            raise TrainerError("no_rank", "no machine offers a rank now: start `art-server host` on one", True)

    def _check_devices(self) -> None:
        """Checks that all ranks compute on one kind of device, before they are started.

        Raises:
            TrainerError: two ranks compute on two kinds.
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

    async def _start(self) -> None:
        """Starts the ranks that do not run, and compares what all ranks compute with: a CPU cannot even sum with a GPU.

        Raises:
            TrainerError: a rank did not start, or the ranks are unlike.
            OSError: this machine could not start a rank's process.
        """
        outcomes = await asyncio.gather(*(rank.start() for rank in self.ranks), return_exceptions=True)
        reason = _likeliest_reason([error for error in outcomes if error is not None])
        if reason is not None:
            raise reason
        difference = difference_of_ranks([rank.machine for rank in self.ranks], [rank.facts for rank in self.ranks])
        if difference is not None:
            raise TrainerError(UNLIKE_RANKS, difference, retryable=True)

    async def _prepare(self) -> None:
        """Sets where the ranks meet, if they have not met."""
        # torch's process group takes no process in place of one that has ended.
        if self._have_met and not self._all_run():
            await self.stop()
        if self._have_met:
            return
        server_addresses = [address for rank in self.ranks if (address := rank.location.server_address)]
        if server_addresses:
            self._use(await self._open_address(server_addresses[0]))
        else:
            assert self._meeting is not None, "several ranks need a file to meet in"
            # torch's FileStore would find what the ranks of an earlier meeting wrote into the file.
            self._meeting.unlink(missing_ok=True)
        self._have_met = True

    async def _open_address(self, server_address: str) -> str:
        """An address at which ranks of several machines find each other: the first rank opens the address.

        Raises:
            RankLost: the first rank's machine is lost.
            TrainerError: the machine has no port.
        """
        first = self.ranks[0].location
        try:
            return f"tcp://{first.address or server_address}:{await first.free_port()}"
        except PlaceLost as error:
            raise RankLost(str(error)) from error
        except PlaceFailed as error:
            raise TrainerError("host_failed", str(error), retryable=True) from error

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
            if self.num_ranks == 1:
                return await self.ranks[0].run(task, on_progress, batch)
            return await self._run_together(task, on_progress, batch)

    async def _run_together(
        self, task: Task, on_progress: Callable[[Progress], Awaitable[None]] | None, batch: bytes | None
    ) -> Done:
        self._check_devices()
        await self._prepare()
        async with contextlib.AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self.stop)
            await self._start()

            async def note(progress: Progress) -> None:
                self._phase, self._idleness = progress.phase, Idleness()
                if on_progress is not None:
                    await on_progress(progress)

            self._phase = ""
            first, *others = self.ranks
            leading = asyncio.create_task(first.run(task, note, batch))
            runs = [leading, *(asyncio.create_task(rank.run(task, None, batch)) for rank in others)]
            error = await self._first_error(runs, asyncio.create_task(self._watch()))
            if error is None or (error.code in IN_STEP and self._all_run()):
                on_failure.pop_all()
        if error is not None:
            raise error
        return leading.result()

    @property
    def _num_machines(self) -> int:
        return len({rank.machine for rank in self.ranks})

    @property
    def _silence_seconds(self) -> float:
        """For how long the network between the ranks, or between them and the server, may be silent."""
        return max(rank.silence_seconds for rank in self.ranks)

    async def _watch(self) -> None:
        """Raises an error when no rank computes in the middle of a step. Without /proc it never does."""
        limit = IDLE_SECONDS + (self._silence_seconds if self._num_machines > 1 else 0.0)
        suspect: Idleness | None = None
        while True:
            await self._clock.sleep(IDLE_SECONDS / 5)
            # The trainer numbers the mini-batches in the phase's name, such as "train 2 of 3".
            if not self._phase.startswith(COMPUTING) or not self._all_run():
                self._idleness = Idleness()
            passed = self._idleness.seconds([rank.usage() for rank in self.ranks])
            # A reading can arrive before the progress that was sent with it. By the next look this progress has replaced
            # `_idleness`, so only ranks that are idle in two looks are stuck.
            if passed > limit and suspect is self._idleness:
                raise self._stuck(f"no rank has computed for {passed:.0f} s: one of them hangs or is stopped")
            suspect = self._idleness if passed > limit else None

    def _stuck(self, reason: str) -> TrainerError:
        """The error of ranks that wait for a rank that does not come. Ranks of several machines may wait for the network."""
        if self._num_machines > 1:
            return RankLost(f"{reason}, or the network between their machines is")
        return TrainerDied(reason)

    def cancel(self) -> None:
        """As `TrainerProcess.cancel`, on all ranks."""
        for rank in self.ranks:
            rank.cancel()

    async def stop(self) -> None:
        """Ends all ranks; a running task ends with TrainerDied."""
        self._have_met = False
        for rank in self.ranks:
            await rank.stop()

    async def _first_error(self, runs: Sequence[asyncio.Task[Done]], watch: asyncio.Task[None]) -> TrainerError | None:
        """The reason why a task failed on some rank, or the error of the watch; None if all ranks have done the task. When
        this returns, no run is left."""
        try:
            pending: set[asyncio.Task[Any]] = {*runs, watch}
            while pending > {watch}:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(ended.exception() for ended in done):
                    break
            if not watch.done() and (rest := pending - {watch}):
                is_lost = any(isinstance(run.exception(), RankLost) for run in runs if run.done())
                # If no machine is lost, the answer of a rank, or the news of its machine's loss, may be under way.
                limit = LAST_SECONDS + (0.0 if is_lost else self._silence_seconds)
                with contextlib.suppress(TimeoutError):
                    async with self._clock.timeout(limit):
                        await asyncio.wait(rest)
        finally:  # a run that is cancelled kills its process
            for run in (*runs, watch):
                run.cancel()
            await asyncio.wait([*runs, watch])
        has_failed = any(run.cancelled() or run.exception() for run in runs)
        errors: list[BaseException] = []
        for run in (watch, *runs):
            # The watch may raise in the moment in which the last rank is done.
            if run is watch and (watch.cancelled() or not has_failed):
                continue
            if run.cancelled():
                errors.append(self._stuck("a rank did not answer after another one had failed: it hangs or is stopped"))
            elif error := run.exception():
                errors.append(error)
        return _likeliest_reason(errors)


class Idleness:
    """For how long ranks were seen to compute nothing. For ranks on other machines the server has readings, which come late
    when the network stalls: only the time between two readings counts as seen."""

    def __init__(self) -> None:
        self._since: Sequence[Usage] = ()
        """The readings since which no rank has computed."""

    def seconds(self, readings: Sequence[Usage | None]) -> float:
        """Takes the newest readings of all ranks. Returns for how long every rank was seen to compute nothing."""
        seen = [reading for reading in readings if reading is not None]
        if len(seen) < len(readings) or len(seen) != len(self._since):
            self._since = seen
            return 0.0
        pairs = list(zip(self._since, seen, strict=True))
        passed = [newest.at - earlier.at for earlier, newest in pairs]
        used = sum(newest.cpu_seconds - earlier.cpu_seconds for earlier, newest in pairs)
        if used > IDLE_SHARE * sum(passed):
            self._since = seen
            return 0.0
        return min(passed)


def log_name(gang: str, number: int) -> str:
    """The log file of a rank: `trainer.log` for rank 0 of the gang `trainer`, `trainer-2.log` for rank 2."""
    return f"{gang}.log" if number == 0 else f"{gang}-{number}.log"


def _likeliest_reason(errors: Sequence[BaseException]) -> TrainerError | None:
    """The error that is most likely the reason of the others; None without errors. An error that is not the trainer's is raised."""
    of_trainer: list[TrainerError] = []
    for error in errors:
        if not isinstance(error, TrainerError):
            raise error
        of_trainer.append(error)
    return min(of_trainer, key=_order_of_reason, default=None)


def _order_of_reason(error: TrainerError) -> int:
    """The lower, the more likely an error is the reason of the other errors. A lost machine breaks sums and ends processes,
    and a death breaks sums. An error that a rank reports of another rank is the least likely reason."""
    if error.code in (*IN_STEP, UNLIKE_RANKS):
        return 0
    known = {"connection_lost": 1, "trainer_died": 2, "trainer_error": 3, "other_rank_failed": 5}
    return known.get(error.code, 4)
