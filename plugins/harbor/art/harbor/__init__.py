"""Tasks in Harbor's format, with any agent's command in a sandbox: docs/howto/harbor.md.

for task in harbor.tasks("tasks"):
    async with art.rollout(model) as r:
        trajectory = await harbor.run(task, "/opt/agents/bin/pi -p {instruction}", r)
"""

import sys

if sys.platform != "linux":
    raise ImportError("art.harbor runs on Linux only: its sandboxes are made of the kernel's namespaces")

from art.harbor.bubblewrap import Bubblewrap
from art.harbor.container import Container
from art.harbor.errors import HarborError, RewardInvalid, SandboxFailed, TaskRefused, TestsTimedOut
from art.harbor.running import Outcome, run, solve
from art.harbor.sandbox import Box, Execution, Sandbox
from art.harbor.tasks import Task, tasks

__all__ = [
    "Box",
    "Bubblewrap",
    "Container",
    "Execution",
    "HarborError",
    "Outcome",
    "RewardInvalid",
    "Sandbox",
    "SandboxFailed",
    "Task",
    "TaskRefused",
    "TestsTimedOut",
    "run",
    "solve",
    "tasks",
]
