"""Log requests: rollouts and metrics that a program gives for a step, outside of training."""

import asyncio

from art_protocol.history import log_metrics
from art_protocol.wire import LogReply, LogRequest
from art_server.errors import InvalidInput
from art_server.jobs.received_trajectories import ReceivedTrajectories
from art_server.jobs.reports import Reports
from art_server.store.registry import RegisteredModel


async def write_log(
    model: RegisteredModel, request: LogRequest, rollouts: ReceivedTrajectories, reports: Reports
) -> LogReply:
    """Writes the rollouts and metrics of a step to disk, and reports them.

    Raises:
        InvalidInput: the step does not exist yet.
    """
    step = model.step if request.step is None else request.step
    newest = max(model.steps(), default=model.step)
    if step > newest:
        raise InvalidInput(
            f"model '{model.id}' has no step {step} yet: its newest is {newest}; log for that step, or leave "
            "`step` out",
            code="step_beyond_newest",
            param="step",
        )
    request = request.model_copy(update={"groups": rollouts.outlines})
    metrics = log_metrics(request)
    # A job has written its rollouts, with the origin of each turn. Programs log them once more.
    if request.groups and not (request.split == "train" and model.folder.tokens_file(step).exists()):
        content = rollouts.content
        await asyncio.to_thread(model.folder.write_lines, request.split, step, content)
    await asyncio.to_thread(model.history.add, step, metrics)
    reply = LogReply(step=step, metrics=metrics)
    reports.logged(model, request.split, reply, has_groups=bool(request.groups))
    return reply
