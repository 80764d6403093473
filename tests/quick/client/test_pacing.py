"""Pipelines on a clock of their own: rollouts and steps of any length, kills at any time."""

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art.pacing import Open, Pace


@dataclass
class Simulation:
    """What PipelineTrainer's loop does with a Pace. A kill loses what runs; the job of the server goes on."""

    pace: Pace
    num_groups: int
    max_concurrent: float
    rng: random.Random
    slow_share: float = 0.0
    step: int = 0
    clock: float = 0.0
    finished: set[Open] = field(default_factory=set)
    running: dict[Open, float] = field(default_factory=dict)
    job: tuple[float, list[Open]] | None = None
    trained: list[list[Open]] = field(default_factory=list)
    seconds_per_step: float = 1.0

    def seconds(self, number: int) -> float:
        is_slow = random.Random(number).random() < self.slow_share
        return (10 if is_slow else 1) * self.rng.uniform(0.5, 1.5)

    def begin(self) -> None:
        next_job = self.step if self.job is None else self.step + 1
        num_open = len(self.finished) + len(self.running)
        room = min(
            self.pace.room(num_open, self.step, next_job),
            self.max_concurrent - len(self.running),
        )
        known = {group.number for group in [*self.finished, *self.running, *itertools.chain(*self.trained)]}
        known |= {group.number for group in self.job[1]} if self.job else set()
        left = [number for number in range(self.num_groups) if number not in known]
        for number in left[: max(0, int(room))]:
            self.running[Open(self.step, number)] = self.clock + self.seconds(number)
        is_last = len(left) <= room
        if self.job is None:
            batch = self.pace.choose(self.finished, self.running, self.step, is_last=is_last)
            if batch:
                self.finished -= set(batch)
                self.job = (self.clock + self.seconds_per_step, batch)

    def wait(self) -> bool:
        """Advances to the next end of a group or job; returns False if nothing runs."""
        ends = [*self.running.values(), *([self.job[0]] if self.job else [])]
        if not ends:
            return False
        self.clock = min(ends)
        for group in [group for group, end in self.running.items() if end <= self.clock]:
            del self.running[group]
            self.finished.add(group)
        if self.job is not None and self.job[0] <= self.clock:
            for group in self.job[1]:
                assert self.step - group.began <= self.pace.max_steps_off_policy
            self.trained.append(self.job[1])
            self.step, self.job = self.step + 1, None
        return True

    def kill(self) -> None:
        self.running.clear()
        if self.job is not None:  # the next start waits for it
            self.trained.append(self.job[1])
            self.step, self.job = self.step + 1, None
        assert set(self.pace.keep(self.finished, self.step)) == self.finished, "a kill makes no group too old"

    def run(self, kills: int = 0) -> None:
        times = sorted(self.rng.randrange(1, 4 * self.num_groups + 2) for _ in range(kills))
        for turn in range(1000 * self.num_groups + 1000):
            while times and turn == times[0]:
                times.pop(0)
                self.kill()
            self.begin()
            if not self.wait():
                return
        raise AssertionError("it does not end")


@settings(max_examples=150)
@given(
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(1, 40),
    st.one_of(st.just(math.inf), st.integers(1, 12)),
    st.floats(0.0, 5.0),
    st.integers(0, 3),
    st.integers(0, 2**32),
)
def test_every_group_is_trained_once_and_none_too_late(
    groups_per_step: int,
    bound: int,
    num_groups: int,
    max_concurrent: float,
    seconds_per_step: float,
    kills: int,
    seed: int,
) -> None:
    rng = random.Random(seed)
    pace = Pace(groups_per_step, bound)
    simulation = Simulation(pace, num_groups, max_concurrent, rng, rng.random(), seconds_per_step=seconds_per_step)
    simulation.run(kills)
    numbers = [group.number for batch in simulation.trained for group in batch]
    assert sorted(numbers) == list(range(num_groups))
    assert all(len(batch) == groups_per_step for batch in simulation.trained[:-1])
    assert not simulation.finished and not simulation.running


def test_slow_groups_are_trained_at_their_share_all_the_time() -> None:
    simulation = Simulation(Pace(8, 3), 1600, math.inf, random.Random(0), slow_share=0.3)
    simulation.run()
    slow = [random.Random(group.number).random() < 0.3 for batch in simulation.trained for group in batch]
    share = sum(slow) / len(slow)
    for half in (slow[: len(slow) // 2], slow[len(slow) // 2 :]):
        assert sum(half) / len(half) == pytest.approx(share, rel=0.2)


def test_rollouts_and_steps_of_one_length_overlap() -> None:
    """A bound of 1 is enough for as many steps as in half the time; a bound of 0 takes turns."""
    clocks: list[float] = []
    for bound in (0, 1):
        simulation = Simulation(Pace(4, bound), 400, math.inf, random.Random(0))
        simulation.seconds = lambda number: 1.0  # type: ignore[method-assign]
        simulation.run()
        clocks.append(simulation.clock)
    assert clocks == [200.0, 101.0]


def test_a_job_waits_for_the_group_that_would_be_too_old() -> None:
    pace = Pace(2, 1)
    fast, slow = [Open(0, 1), Open(0, 2), Open(0, 3), Open(1, 4), Open(1, 5)], Open(0, 0)
    assert pace.choose(fast[:3], [slow], 0, is_last=False) == fast[:2], "two of four are left for job 1"
    assert pace.choose(fast[2:], [slow], 1, is_last=False) == []
    assert pace.choose([slow, *fast[2:]], [], 1, is_last=False) == [slow, fast[2]], "the oldest first"


def test_the_last_job_may_be_smaller_once_nothing_runs() -> None:
    pace, group = Pace(2, 1), Open(0, 0)
    assert pace.choose([group], [], 0, is_last=False) == []
    assert pace.choose([group], [Open(0, 1)], 0, is_last=True) == []
    assert pace.choose([group], [], 0, is_last=True) == [group]


def test_what_a_lower_bound_no_longer_allows_is_not_kept() -> None:
    groups = [Open(3, 0), Open(5, 1), Open(5, 2), Open(5, 3)]
    assert Pace(1, 4).keep(groups, 5) == groups
    assert Pace(1, 1).keep(groups, 5) == groups[1:3], "job 5 and job 6"
    assert Pace(4, 0).keep(groups, 5) == groups[1:]
