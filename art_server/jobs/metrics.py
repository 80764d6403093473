"""The metrics of train and log calls and of the steps that sampled, and the news of a job as `reports.py` receives it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from art_protocol.history import log_metrics
from art_protocol.wire import JobReport, LogReply, LogRequest
from art_server.errors import InvalidInput
from art_server.jobs.queue import Job
from art_server.jobs.rollouts import Rollouts
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


async def write_log(model: Model, request: LogRequest, rollouts: Rollouts) -> LogReply:
    """Writes the rollouts and metrics of a step to disk.

    Raises:
        InvalidInput: the step does not exist yet.
    """
    step = model.step if request.step is None else request.step
    if step > model.step:
        raise InvalidInput(
            f"model '{model.id}' has no step {step} yet: its newest is {model.step}; log for that step, or leave "
            "`step` out",
            code="step_beyond_newest",
            param="step",
        )
    request = request.model_copy(update={"groups": rollouts.outlines})
    metrics = log_metrics(request)
    # A job has written its rollouts, with the origin of each turn. Programs log them once more.
    if request.groups and not (
        request.split == "train" and model.folder.tokens_file(step).exists()
    ):
        content = rollouts.content
        await asyncio.to_thread(model.folder.write_lines, request.split, step, content)
    await asyncio.to_thread(model.history.add, step, metrics)
    return LogReply(step=step, metrics=metrics)
