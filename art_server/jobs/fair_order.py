"""In which order the jobs of several projects run: start-time fair queueing.

Each project gets its share of the trainer, in tokens. A job begins at a virtual time: that of the job that began before it, or
the end of its project's last job if that is later. It takes its tokens divided by the project's weight. The job that would begin
first is next; of equal ones the oldest. A project that was idle saves nothing up, and one that queues many jobs delays others by
one of them. Inside a project jobs keep their order.

Source: Goyal, Vin and Cheng 1997, Start-time Fair Queueing, IEEE/ACM Transactions on Networking 5(5), section II.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from art_server.jobs.job_row import WaitingJob


@dataclass(slots=True)
class FairOrder:
    """The virtual times so far. `began` and `finishes` are of jobs that have begun (`JobQueue`)."""

    weights: Mapping[str, float]
    """By project; 1 for others."""
    began: float = 0.0
    """When the latest job began."""
    finishes: dict[str, float] = field(default_factory=dict)
    """When the last job of each project ends."""

    def begin(self, job: WaitingJob) -> tuple[float, float]:
        """Takes the job as the next one. Returns when it begins and ends."""
        begins = max(self.began, self.finishes.get(job.project, 0.0))
        ends = begins + job.num_tokens / self.weights.get(job.project, 1.0)
        self.began, self.finishes[job.project] = begins, ends
        return begins, ends

    def sort(self, jobs: Iterable[WaitingJob]) -> list[WaitingJob]:
        """The jobs in the order in which they will begin, if no other comes. They arrive in the order of the queue. One that has
        begun and is tried again keeps its time."""
        of_project: dict[str, deque[tuple[int, WaitingJob]]] = {}
        ordered = FairOrder(self.weights, self.began, dict(self.finishes))
        heads: list[tuple[float, int, str]] = []
        for number, job in enumerate(jobs):
            of_project.setdefault(job.project, deque()).append((number, job))

        def push(project: str) -> None:
            if of_project[project]:
                number, job = of_project[project][0]
                begins = max(ordered.began, ordered.finishes.get(project, 0.0))
                heapq.heappush(heads, (begins if job.begins is None else job.begins, number, project))

        for project in of_project:
            push(project)
        found: list[WaitingJob] = []
        while heads:
            _, _, project = heapq.heappop(heads)
            _, job = of_project[project].popleft()
            found.append(job)
            if job.begins is None:
                ordered.begin(job)
            push(project)
        return found
