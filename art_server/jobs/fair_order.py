"""In which order the jobs of several projects run: start-time fair queueing.

Each project gets its share of the trainer, in tokens. A job begins at a virtual time: when the latest job began, or when the
last job of its project ends, if that is later. The job lasts its tokens divided by the project's weight. The job that would
begin first is next; among equal jobs, the oldest. A project that was idle saves nothing up. A project that queues many jobs
delays the others by one job. Inside a project jobs keep their order, also jobs of different
models. `JobQueue.waiting` sorts the jobs that wait, and `JobRunner._choose` takes the first that can run.

Source: Goyal, Vin and Cheng 1997, Start-time Fair Queueing, IEEE/ACM Transactions on Networking 5(5), section II.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from art_server.jobs.job_row import WaitingJob


@dataclass(slots=True)
class FairOrder:
    """The virtual times so far. `began` and `finishes` come from jobs that have begun (`JobQueue`)."""

    weights: Mapping[str, float]
    """The weights of projects; other projects have the weight 1."""
    began: float = 0.0
    """When the latest job began."""
    finishes: dict[str, float] = field(default_factory=dict)
    """When the last job of each project ends."""

    def times(self, job: WaitingJob) -> tuple[float, float]:
        """When the job begins and ends if it is the next one."""
        begins = max(self.began, self.finishes.get(job.project, 0.0))
        return begins, begins + job.num_tokens / self.weights.get(job.project, 1.0)

    def begin(self, job: WaitingJob) -> None:
        """Takes the job as the next one."""
        self.began, self.finishes[job.project] = self.times(job)

    def sort(self, jobs: Iterable[WaitingJob]) -> list[WaitingJob]:
        """The jobs in the order in which they will begin, if no other job comes. `jobs` are in the order of the queue. A job
        that has begun and is tried again keeps its time."""
        of_project: dict[str, deque[tuple[int, WaitingJob]]] = {}
        order = FairOrder(self.weights, self.began, dict(self.finishes))
        heads: list[tuple[float, int, str]] = []
        for number, job in enumerate(jobs):
            of_project.setdefault(job.project, deque()).append((number, job))

        def push(project: str) -> None:
            if of_project[project]:
                number, job = of_project[project][0]
                begins = order.times(job)[0] if job.begins is None else job.begins
                heapq.heappush(heads, (begins, number, project))

        for project in of_project:
            push(project)
        in_order: list[WaitingJob] = []
        while heads:
            _, _, project = heapq.heappop(heads)
            _, job = of_project[project].popleft()
            in_order.append(job)
            if job.begins is None:
                order.begin(job)
            push(project)
        return in_order
