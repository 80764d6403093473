"""When a pipeline begins a group, and which groups it trains next. Pure functions on the steps at which groups began.

A job that starts at step s trains `groups_per_step` groups. Its samples are at most `max_steps_off_policy` steps old, so a
group that began at step b is trained by job b + max_steps_off_policy at the latest. A group begins only where all open
groups (running, or finished and in no job) keep this limit even if each job takes the oldest groups. A job takes the oldest
of the finished groups, unless a running group would then be too late: the job waits for this group. So no group is ever too
old.
Source: the admission rule of AReaL, Fu et al. 2025, arXiv:2505.24298, section 5.1.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple


class Open(NamedTuple):
    """A group that runs, or has finished and is in no job. The oldest sorts first."""

    began: int
    """The newest step when the group began. This step or a later step sampled each token of the group."""
    number: int
    """The number of the group's scenario, from 0."""


class Pace(NamedTuple):
    """The limits of a pipeline."""

    groups_per_step: int
    max_steps_off_policy: int

    def room(self, num_open: int, serving: int, next_job: int) -> int:
        """The number of groups that may begin now, while the step `serving` answers. `next_job` is the step at which the
        next job starts: `serving`, or one more while a job runs."""
        return (serving + self.max_steps_off_policy + 1 - next_job) * self.groups_per_step - num_open

    def choose(
        self, finished: Iterable[Open], running: Collection[Open], next_job: int, *, is_last: bool
    ) -> list[Open]:
        """The groups of the next job, oldest first; empty: the job has to wait. `is_last`: no further group begins, so that
        the last job may be smaller."""
        oldest = sorted(finished)
        batch, rest = oldest[: self.groups_per_step], [*oldest[self.groups_per_step :], *running]
        is_full = len(batch) == self.groups_per_step or (is_last and not running)
        return batch if is_full and len(self.keep(rest, next_job + 1)) == len(rest) else []

    def keep(self, groups: Iterable[Open], next_job: int) -> list[Open]:
        """The groups that jobs from `next_job` on can train in time, oldest first."""
        kept: list[Open] = []
        for group in sorted(groups):
            job = next_job + len(kept) // self.groups_per_step
            if job <= group.began + self.max_steps_off_policy:
                kept.append(group)
        return kept
