"""A running server for the page: its state is made up, and its jobs can be cancelled. Has the parts of
`Server` that the page's routes use."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from art_protocol.learning import LearningInfo, Policy, ReleaseArm, ReleaseInfo
from art_protocol.wire import Dropped, ErrorDetail, Health, JobInfo, JobReport, JobState
from art_server.api import control
from art_server.shared import clock
from art_server.status.activity import Activity, Doing
from art_server.status.machine import memory
from art_watch.view import make_view

LEARNER = "demo/webnav-8b"
DISK_FREE_BYTES = 1.2e9


class DemoServer:
    """`is_idle`: no program uses it."""

    def __init__(self, root: Path, is_idle: bool = False):
        self._root, self._is_idle = root, is_idle
        self.status = self.runner = self.collector = self
        self._activity = Activity(lambda: frozenset())
        samples: list[tuple[int, frozenset[Doing]]] = [
            (1230, frozenset({"rollouts"})),
            (610, frozenset({"training", "waiting"})),
            (120, frozenset({"swap", "waiting"})),
            (440, frozenset()),
        ]
        samples = [(2400, frozenset())] if is_idle else samples
        for num, doing in samples:
            self._activity._samples.extend([doing] * num)
        states: list[tuple[JobState, str]] = [
            ("running", "webnav-8b"),
            ("queued", "sql-repair"),
            ("done", "webnav-8b"),
            ("failed", "tau-airline"),
            ("cancelled", "math-hints"),
        ]
        self.infos = {
            f"job-{number}": make_job(f"job-{number}", name, state, 60.0 + 400 * number)
            for number, (state, name) in enumerate([] if is_idle else states)
        }

    def health(self, *, names_model: bool = True) -> Health:
        del names_model  # nobody waits
        return Health(
            engine="ready",
            base_model="Qwen/Qwen3-8B",
            version="1.0.0",
            longest_stall_seconds=0.214,
            faults={}
            if self._is_idle
            else {"records": f"the disk is nearly full: {DISK_FREE_BYTES / 1e9} GB are free"},
        )

    def activity(self) -> dict[str, Any]:
        return self._activity.report()

    def memory(self) -> dict[str, Any]:
        report = memory(self._root, {})
        report["disk_free_bytes"] = 512e9 if self._is_idle else DISK_FREE_BYTES
        report["resident_bytes"] = {"server": 212e6, "engine": 18.4e9, "trainer": 21.7e9}
        return report

    async def jobs(self, projects: frozenset[str] | None, states: Sequence[JobState], limit: int) -> list[JobInfo]:
        del projects
        return [job for job in self.infos.values() if job.state in states][:limit]

    async def learners(
        self, projects: frozenset[str] | None = None, only: str | None = None
    ) -> dict[str, LearningInfo]:
        del projects
        known = {} if self._is_idle else {LEARNER: learning_info()}
        return {model: info for model, info in known.items() if only in (None, model)}

    async def get(self, job_id: str) -> JobInfo:
        return self.infos[job_id]

    info = get

    async def cancel(self, job_id: str) -> None:
        self.infos[job_id] = self.infos[job_id].model_copy(update={"state": "cancelled"})


def learning_info() -> LearningInfo:
    """A model that learns, in the middle of a canary."""
    arms = (
        ReleaseArm(step=12, scored=288, users=201, mean=0.613, interval=(0.556, 0.67)),
        ReleaseArm(step=16, scored=124, users=88, mean=0.653, interval=(0.568, 0.738)),
    )
    return LearningInfo(
        state="on",
        policy=Policy(release="canary"),
        reason="step 16 answers 30% of the users: 412 of 800 scored answers, +0.040 (z 1.1); the next look comes at 800",
        counts={"scored": 61, "trained": 2048, "dropped": 9, "dropped: capped": 9},
        serving_step=12,
        newest_step=16,
        release=ReleaseInfo(
            state="canary",
            incumbent=12,
            passed=16,
            candidate=16,
            share=0.3,
            arms=arms,
            z=1.1,
            began_at=clock.now() - 86400,
        ),
    )


def make_job(job_id: str, name: str, state: JobState, seconds_ago: float) -> JobInfo:
    report = JobReport(num_groups=6, num_trajectories=48)
    if state == "done":
        dead = Dropped(reason="all rewards in the group are equal: no signal", count=1, unit="group")
        notes = ["in 2 groups all trajectories have the same sampled tokens"]
        changes = {"num_groups_trained": 5, "num_trained_tokens": 3521, "dropped": [dead], "notes": notes}
        report = report.model_copy(update=changes)
    refused = ErrorDetail(message="the gap is 1.3 on average; rounding explains at most 1")
    return JobInfo(
        job_id=job_id,
        project="demo",
        name=name,
        state=state,
        step=30 if state == "done" else None,
        report=report,
        phase="train" if state == "running" else "queued",
        completed=31 if state == "running" else None,
        total=48 if state == "running" else None,
        error=refused if state == "failed" else None,
        created_at=clock.now() - seconds_ago,
        finished_at=None if state in ("queued", "running") else clock.now() - seconds_ago + 97,
        waits_for="1 earlier job, of demo/webnav-8b" if state == "queued" else None,
    )


def make_live(root: Path, is_idle: bool = False) -> FastAPI:
    """The page over a folder, with a running server."""
    app = make_view(root)
    app.state.server = DemoServer(root, is_idle)
    app.include_router(control.router)
    return app
