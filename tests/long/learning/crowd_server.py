"""A server that learns from scores, whose engine and trainer are fakes, and which dies at a named point. A quarter of its new steps are
broken, as far as its guard can see.

    ART_CHAOS_POINT="promoted:1" python -m tests.long.learning.crowd_server FOLDER PORT
"""

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

import uvicorn

from art_server.jobs.queue import JobQueue
from art_server.learning.guard import Guard
from art_server.learning.releases import Releases
from art_server.learning.scores import Scores
from art_server.models.checkpoints import Checkpoints
from art_server.settings import ServerConfig
from art_server.store import files
from tests.long.chaos import server as chaos
from tests.quick.server.served import Served

POINTS: dict[str, tuple[Any, str, bool]] = {
    "a score comes": (Scores, "add", False),
    "a score is written": (Scores, "add", True),
    "a batch is chosen": (JobQueue, "insert", False),
    "a batch is being queued": (Scores, "queue", True),
    "a release is being opened": (Releases, "begin", True),
    "a batch is queued": (JobQueue, "insert", True),
    "a step is renamed": (files, "publish_folder", True),
    "a job ends": (JobQueue, "set_done", False),
    "scores are being trained": (Scores, "end_job", True),
    "a job is done": (JobQueue, "set_done", True),
    "the guard begins": (Guard, "why_refused", False),
    "the guard ends": (Guard, "why_refused", True),
    "a step has passed": (Releases, "note_passed", True),
    "a step is refused": (Releases, "note_refused", True),
    "a canary begins": (Releases, "split", True),
    "a look decides nothing": (Releases, "note_look", True),
    "before a promotion": (Releases, "promote", False),
    "promoted": (Releases, "promote", True),
    "a rollback begins": (Checkpoints, "roll_back", False),
    "a release is being rolled back": (Releases, "roll_back", True),
    "steps are set aside": (Checkpoints, "_set_aside", True),
    "rolled back": (Checkpoints, "roll_back", True),
}


def break_steps(chance: random.Random) -> None:
    why_refused = Guard.why_refused

    async def refused_now_and_then(self: Guard, *arguments: Any) -> str | None:
        return await why_refused(self, *arguments) or ("planted" if chance.random() < 0.25 else None)

    Guard.why_refused = refused_now_and_then  # type: ignore[method-assign]


async def main(folder: Path, port: int) -> None:
    served = Served(ServerConfig(path=folder))
    await served.engine.listen()
    await uvicorn.Server(uvicorn.Config(served.app, port=port, log_level="warning")).serve()


if __name__ == "__main__":
    break_steps(random.Random())
    if wanted := os.environ.pop(chaos.VARIABLE, None):
        chaos.POINTS.update(POINTS)
        point, _, count = wanted.partition(":")
        chaos.arm(point, int(count))
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
