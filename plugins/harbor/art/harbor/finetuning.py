"""Tasks as the rows of `art finetune` and `art eval`, which name these functions: the rows, the workflow and the evaluator."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import art
from art.harbor.bubblewrap import Bubblewrap
from art.harbor.running import Outcome, attempt
from art.harbor.tasks import read_task, tasks


def rows(folder: str, agent: str, mounts: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row for each task of a folder. `agent` is the command, and `mounts` are folders of the host by their paths in the box.

    Raises:
        TaskRefused: the folder has no task, or a task's files are wrong.
    """
    return [
        {
            "id": task.name,
            "question": task.instruction,
            "answer": "",
            "folder": str(task.folder),
            "agent": agent,
            "mounts": dict(mounts),
        }
        for task in tasks(folder)
    ]


async def play(row: dict[str, Any], rollout: art.Rollout) -> Outcome:
    """The workflow: the agent's command in a box. The output is scored by `reward`."""
    return await attempt(
        read_task(Path(row["folder"])), row["agent"], rollout, sandbox=Bubblewrap(mounts=row["mounts"])
    )


def reward(output: Outcome, trajectory: art.Trajectory) -> float:
    """The evaluator: the reward of the task's tests. The trajectory gets the metrics and logs of the rollout."""
    output.note_in(trajectory)
    return output.reward
