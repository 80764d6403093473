"""The metrics of the steps that sampled, and the news of a job as `reports.py` receives it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from art_protocol.wire import JobReport
from art_server.jobs.queue import Job
from art_server.store.registry import Model

Event = Literal["accepted", "phase", "waiting", "done", "failed", "cancelled"]
ENDS = ("done", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class DoneStep:
    """The step that a job made."""

    model: Model
    step: int
    metrics: Mapping[str, float]
    report: JobReport


@dataclass(frozen=True, slots=True)
class JobNews:
    """One change of a job."""

    job: Job
    event: Event
    phase: str = ""
    key: str | None = None
    """With "accepted": the client's idempotency key."""
    error: str | None = None
    """With "waiting" and "failed": the error's code."""
    done: DoneStep | None = None
    """With "done"."""


def step_metrics(tokens_of_steps: Mapping[int, int]) -> dict[str, float]:
    """The first and the last step that sampled tokens of a batch, and the step that sampled most of them. Empty if no
    token's step is known."""
    if not tokens_of_steps:
        return {}
    most = max(tokens_of_steps, key=lambda step: (tokens_of_steps[step], step))
    return {
        "sampled_step": float(most),
        "sampled_step_min": float(min(tokens_of_steps)),
        "sampled_step_max": float(max(tokens_of_steps)),
    }
