"""The trainer's processes from the server's side: one, or several ranks that train each job together (`trainer/gang.py`)."""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from art_server.jobs.trainer_process import TrainerDied, TrainerError, TrainerProcess, worker_command
from art_server.process.children import Children
from art_server.process.shared.trainer_messages import (
    CheckTask,
    Done,
    InitTask,
    Progress,
    Task,
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
COMPUTING = ("train", "forward")
"""Phases in which the ranks compute."""
IN_STEP = ("cancelled", "non_finite", "gap_too_large", "out_of_memory")
"""Errors that all ranks have alike, so that they can train the next job. After others they are ended."""


class Gang(TrainerProcess):
    """All ranks as one process: this is the first, which writes the files and reports progress, and holds the others.

    They are started together, and if one ends or fails by itself all are ended: none of them holds anything that the job does
    not repeat.
    """

    def __init__(
        self,
        log_dir: Path,
        environments: Sequence[Mapping[str, str]],
        children: Children | None = None,
        meeting: Path | None = None,
        name: str = "trainer",
    ) -> None:
        """One rank for each of the environments. Several of them meet in the file `meeting`. `name` is that of their logs."""
        super().__init__((), log_dir / f"{name}.log", environments[0], children)
        self._others = [
            TrainerProcess((), log_dir / f"{name}-{rank}.log", environment, children)
            for rank, environment in enumerate(environments[1:], 1)
        ]
        self._meeting = meeting
        self._have_met = False
        self._turn = asyncio.Lock()
        self._phase = ""
        """What the first rank does."""

    @property
    def _ranks(self) -> list[TrainerProcess]:
        return [self, *self._others]

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    def _all_run(self) -> bool:
        return all(each.is_running for each in self._ranks)

    @property
    def pids(self) -> dict[str, int | None]:
        """The process of each rank by name; None while it does not run."""
        return {each._log.path.stem: each.pid for each in self._ranks}

    def use(self, config: WorkerConfig) -> None:
        """Sets how the ranks work; the first task starts them."""
        for rank, each in enumerate(self._ranks):
            update = {"rank": rank, "num_ranks": self.num_ranks, "meeting": str(self._meeting)}
            each._command = worker_command(config.model_copy(update=update) if self._others else config)

    async def run(
        self,
        task: Task,
        on_progress: Callable[[Progress], Awaitable[None]] | None = None,
        batch: bytes | None = None,
    ) -> Done:
        if not self._others or isinstance(task, InitTask | CheckTask):
            return await super().run(task, on_progress, batch)
        async with self._turn, contextlib.AsyncExitStack() as on_failure:
            if self._have_met and not self._all_run():
                await self.stop()
            if not self._have_met:
                assert self._meeting is not None, "several ranks need a place to meet"
                self._meeting.unlink(missing_ok=True)
                self._have_met = True
            on_failure.push_async_callback(self.stop)

            async def note(progress: Progress) -> None:
                self._phase = progress.phase
                if on_progress is not None:
                    await on_progress(progress)

            self._phase = ""
            first = asyncio.create_task(super().run(task, note, batch))
            runs = [first, *(asyncio.create_task(each.run(task, None, batch)) for each in self._others)]
            error = await _first_error(runs, asyncio.create_task(self._watch()))
            if error is None or (error.code in IN_STEP and self._all_run()):
                on_failure.pop_all()
        if error is not None:
            raise error
        return first.result()

    async def _watch(self) -> None:
        """Raises TrainerDied when no rank computes in the middle of a step. Without /proc it never does."""
        used, since = 0.0, time.monotonic()
        while True:
            await asyncio.sleep(IDLE_SECONDS / 5)
            now, pids = sum(map(cpu_seconds, filter(None, self.pids.values()))), list(self.pids.values())
            passed = time.monotonic() - since
            if not self._phase.startswith(COMPUTING) or None in pids or now - used > IDLE_SHARE * passed * len(pids):
                used, since = now, time.monotonic()
            elif passed > IDLE_SECONDS:
                raise TrainerDied(f"no rank has computed for {passed:.0f} s: one of them hangs or is stopped")

    def cancel(self) -> None:
        super().cancel()
        for each in self._others:
            each.cancel()

    async def stop(self) -> None:
        self._have_met = False
        await super().stop()
        for each in self._others:
            await each.stop()


def cpu_seconds(pid: int) -> float:
    """What a process has used of the cores, with all its threads; 0 if that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    if error.code in IN_STEP:
        return 0
    return {"trainer_died": 1, "trainer_error": 2, "other_rank_failed": 4}.get(error.code, 3)
