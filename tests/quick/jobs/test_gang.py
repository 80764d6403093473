"""What the server takes for the death of a rank, and what for silence of the network to it."""

import asyncio
import errno
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from art_server.jobs.backoff import error_detail
from art_server.jobs.gang import IDLE_SECONDS, LAST_SECONDS, Gang, Idleness
from art_server.jobs.trainer_process import RankLost, TrainerDied, TrainerError, TrainerProcess, Usage
from art_server.process.place import PlaceLost
from art_server.shared.trainer_messages import Done, LoadTask, Progress, Task
from tests.fakes.clock import FakeClock
from tests.fakes.places import Elsewhere
from tests.waiting import until

pytestmark = pytest.mark.anyio

TASK = LoadTask()
BROKEN = TrainerError("other_rank_failed", "Connection reset by peer", retryable=True)


class Rank(TrainerProcess):
    """A rank that ends as it is told, once it is told."""

    def __init__(self, machine: str, end: TrainerError | None, readings: Sequence[Usage] = ()) -> None:
        location = Elsewhere(machine, silence_seconds=0.0 if machine == "this machine" else 0.1)
        super().__init__(location=location, log_path=Path("rank.log"), cache_dir=Path("unsloth"))
        self.may_end = asyncio.Event()
        self.num_readings = 0
        self.start_error: Exception | None = None
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.has_started = False
        self._end = end
        self._readings = readings

    @property
    def is_running(self) -> bool:
        return True

    async def start(self) -> None:
        await self.may_start.wait()
        self.has_started = True
        if self.start_error is not None:
            raise self.start_error

    def usage(self) -> Usage | None:
        self.num_readings += 1
        return self._readings[min(self.num_readings, len(self._readings)) - 1] if self._readings else None

    async def run(
        self,
        task: Task,
        on_progress: Callable[[Progress], Awaitable[None]] | None = None,
        batch: bytes | None = None,
    ) -> Done:
        if on_progress is not None:
            await on_progress(Progress(phase="train", completed=0, total=1))
        await self.may_end.wait()
        if self._end is not None:
            raise self._end
        return Done(metrics={})

    async def stop(self) -> None: ...


def gang_of(folder: Path, *ranks: Rank, clock: FakeClock | None = None) -> Gang:
    clock = clock or FakeClock()
    gang = Gang(log_dir=folder, locations=[], cache_dir=folder, meeting=folder / "meeting", clock=clock)
    gang.add(ranks)
    return gang


def beats(*readings: tuple[float, float]) -> list[list[Usage]]:
    """Readings of two ranks, from pairs of seconds of a core and a time."""
    return [[Usage(used, at), Usage(used, at + 0.5)] for used, at in readings]


def seen(readings: Sequence[Sequence[Usage | None]]) -> list[float]:
    idleness = Idleness()
    return [idleness.seconds(reading) for reading in readings]


def test_ranks_that_compute_are_not_idle_because_their_beats_are_late() -> None:
    """Looked at once a second; no beat comes for 8 s, then all of them."""
    times = [0.0, 2.0, 4.0, *[4.0] * 8, 12.0, 14.0]
    assert max(seen(beats(*((at, at) for at in times)))) == 0.0


def test_ranks_that_wait_are_idle_for_the_time_that_was_seen() -> None:
    assert seen(beats((3.0, 0.0), (3.0, 2.0), (3.0, 2.0), (3.01, 4.0), (3.02, 6.0))) == [0.0, 2.0, 2.0, 4.0, 6.0]
    assert seen(beats((3.0, 0.0), (3.0, 4.0), (4.0, 6.0), (4.0, 8.0))) == [0.0, 4.0, 0.0, 2.0]


def test_a_rank_that_is_not_heard_keeps_the_others_from_being_judged() -> None:
    one, other = [Usage(1.0, float(at)) for at in range(20)], Usage(1.0, 0.0)
    assert max(seen([[usage, other] for usage in one])) == 0.0
    assert max(seen([[usage, None] for usage in one])) == 0.0


@pytest.mark.parametrize(
    ("machines", "code"),
    [
        (("this machine", "this machine"), "trainer_died"),
        (("host a", "host a"), "trainer_died"),
        (("host a", "host b"), "connection_lost"),
    ],
)
async def test_ranks_that_stand_still_end_the_step(tmp_path: Path, machines: tuple[str, str], code: str) -> None:
    """Between two machines it may be the network, which no job has broken."""
    readings = [Usage(1.0, at * IDLE_SECONDS) for at in range(1000)]
    gang = gang_of(tmp_path, *(Rank(machine, None, readings) for machine in machines))
    with pytest.raises(TrainerError, match="one of them hangs or is stopped") as caught:
        await gang.run(TASK)
    assert caught.value.code == code and caught.value.retryable


async def test_ranks_whose_last_answer_came_late_are_not_idle(tmp_path: Path) -> None:
    """Their readings say that they wait, because they are done: the answer came with the readings."""
    ranks = [Rank("host a", None, [Usage(1.0, 0.0), Usage(1.0, 8.0)]) for _ in range(2)]
    gang = gang_of(tmp_path, *ranks)
    usage = ranks[1].usage

    def answer_with_the_reading() -> Usage | None:
        if ranks[1].num_readings == 1:
            for rank in ranks:
                rank.may_end.set()
        return usage()

    ranks[1].usage = answer_with_the_reading  # type: ignore[method-assign]
    assert (await gang.run(TASK)).metrics == {}


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([BROKEN, RankLost("host b was lost")], "connection_lost"),
        ([TrainerDied("aborted"), RankLost("host b was lost")], "connection_lost"),
        ([BROKEN, TrainerDied("killed")], "trainer_died"),
        ([BROKEN, BROKEN], "other_rank_failed"),
        ([RankLost("host b was lost"), TrainerError("gap_too_large", "by 3")], "gap_too_large"),
    ],
)
async def test_a_lost_machine_is_the_reason_of_what_its_loss_breaks(
    tmp_path: Path, ends: list[TrainerError], code: str
) -> None:
    ranks = [Rank(f"host {number}", end) for number, end in enumerate(ends)]
    gang = gang_of(tmp_path, *ranks)
    running = asyncio.create_task(gang.run(TASK))
    ranks[0].may_end.set()
    await asyncio.sleep(0)
    ranks[1].may_end.set()
    with pytest.raises(TrainerError) as caught:
        await running
    assert caught.value.code == code


async def test_ranks_that_compute_unlike_get_no_task(tmp_path: Path) -> None:
    ranks = [Rank("host a", None), Rank("host b", None)]
    ranks[0].facts, ranks[1].facts = {"number type": "float32"}, {"number type": "bfloat16"}
    with pytest.raises(
        TrainerError, match=r"host a and rank 1 on host b .* number type float32 and bfloat16"
    ) as caught:
        await gang_of(tmp_path, *ranks).run(TASK)
    assert (caught.value.code, caught.value.retryable) == ("unlike_ranks", True)


async def test_a_rank_that_does_not_start_is_the_reason(tmp_path: Path) -> None:
    ranks = [Rank("host a", None), Rank("host b", None)]
    ranks[1].start_error = TrainerDied("it ended with status 1")
    with pytest.raises(TrainerDied, match="status 1"):
        await gang_of(tmp_path, *ranks).run(TASK)


async def test_of_several_starts_that_fail_the_likeliest_reason_is_the_job_s(tmp_path: Path) -> None:
    """Also if it is known last: a start is not given up because another one has failed."""
    ranks = [Rank("host a", None), Rank("host b", None)]
    ranks[0].start_error, ranks[1].start_error = BROKEN, RankLost("host b was lost")
    ranks[1].may_start.clear()
    running = asyncio.create_task(gang_of(tmp_path, *ranks).run(TASK))
    await until(lambda: ranks[0].has_started)
    for _ in range(9):
        await asyncio.sleep(0)
    assert not running.done()
    ranks[1].may_start.set()
    with pytest.raises(RankLost):
        await running


async def test_an_error_of_the_system_at_a_start_is_the_job_s_error_as_it_is(tmp_path: Path) -> None:
    ranks = [Rank("this machine", None), Rank("this machine", None)]
    ranks[1].start_error = OSError(errno.EMFILE, "Too many open files")
    with pytest.raises(OSError, match="Too many open files") as caught:
        await gang_of(tmp_path, *ranks).run(TASK)
    detail = error_detail(caught.value)
    assert (detail.code, detail.retryable) == ("system_error", True)


async def test_a_lost_machine_has_no_rank_in_the_next_job(tmp_path: Path) -> None:
    """Also before the server has closed the machine's connection."""
    kept, lost = Rank("host a", None), Rank("host b", None)
    gang = gang_of(tmp_path, kept, lost)
    lost.location.lost = "its connection ended"  # type: ignore[misc]
    kept.may_end.set()
    await gang.run(TASK)
    assert gang.ranks == [kept]


async def test_a_machine_that_is_lost_before_the_ranks_meet_is_a_lost_machine(tmp_path: Path) -> None:
    class Lost(Elsewhere):
        server_address = "10.0.0.1"

        async def free_port(self) -> int:
            raise PlaceLost("host a was lost: its connection ended")

    ranks = [Rank("host a", None), Rank("host b", None)]
    ranks[0].location = Lost("host a")
    with pytest.raises(RankLost, match="host a was lost"):
        await gang_of(tmp_path, *ranks).run(TASK)


@pytest.mark.parametrize(
    ("machines", "code"),
    [(("this machine", "this machine"), "trainer_died"), (("host a", "host b"), "connection_lost")],
)
async def test_a_rank_that_does_not_answer_after_another_one_has_failed(
    tmp_path: Path, machines: tuple[str, str], code: str
) -> None:
    """Its machine may not be reached by the others, and be well."""
    ranks = [Rank(machines[0], BROKEN), Rank(machines[1], None)]
    ranks[0].may_end.set()
    clock = FakeClock()
    running = asyncio.create_task(gang_of(tmp_path, *ranks, clock=clock).run(TASK))
    await clock.end(LAST_SECONDS + max(rank.silence_seconds for rank in ranks))
    with pytest.raises(TrainerError) as caught:
        await running
    assert caught.value.code == code


async def test_the_news_of_a_loss_is_waited_for_as_long_as_a_network_may_be_silent(tmp_path: Path) -> None:
    clock = FakeClock()
    ranks = [Rank("host a", BROKEN), Rank("host b", RankLost("host b was lost"))]
    ranks[1].location = Elsewhere("host b", silence_seconds=600.0)
    running = asyncio.create_task(gang_of(tmp_path, *ranks, clock=clock).run(TASK))
    ranks[0].may_end.set()
    await clock.reach(LAST_SECONDS + 600.0)
    clock.advance(LAST_SECONDS + 599.0)
    for _ in range(9):
        await asyncio.sleep(0)
    assert not running.done()
    ranks[1].may_end.set()
    with pytest.raises(RankLost):
        await running
