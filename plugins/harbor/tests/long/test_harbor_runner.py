"""The ten tasks through Harbor's own runner: its agents oracle and nop get the rewards that our runner gives.

Harbor needs Python 3.12, so Harbor has an environment of its own:

    python3.12 -m venv .build/harbor-runner
    .build/harbor-runner/bin/pip install harbor==0.26.0 podman-compose
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from art import harbor
from art.harbor.rewards import read_reward
from art.harbor.running import play
from plugins.harbor.tests.boxed import TASKS, needs_bubblewrap
from plugins.harbor.tests.images import import_image, write_root

pytestmark = [pytest.mark.anyio, needs_bubblewrap]

ROOT = Path(__file__).parents[4]
PATH = f"{ROOT / '.build' / 'harbor-runner' / 'bin'}{os.pathsep}{os.environ['PATH']}"
IMAGE = "localhost/art-harbor-tasks"
PROGRAMS = (
    "awk basename bash cat chmod chown cmp cp date dirname echo env find grep head id ls mkdir mktemp mv printf "
    "python3 rm sed seq sh sleep sort stat tail tar tee test timeout touch tr true uname wc"
)
HARBOR_ENDS_NO_AGENT = "keep-going"
"""Harbor leaves the processes of an agent that takes too long. The tests of this task look for them: only our runner gives 1."""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with what the ten tasks need, Python too."""
    for program in ("harbor", "podman-compose", "podman"):
        if shutil.which(program, path=PATH) is None:
            pytest.skip(
                f"{program} is not installed: Harbor's runner needs Python 3.12, and here podman and podman-compose"
            )
    root = tmp_path_factory.mktemp("root")
    write_root(root, PROGRAMS.split())
    library = subprocess.run(
        ["/usr/bin/python3", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    unused = shutil.ignore_patterns("test", "idlelib", "lib2to3", "ensurepip", "__pycache__", "config-*")
    shutil.copytree(library, root / library.lstrip("/"), ignore=unused)
    import_image(root, IMAGE)
    return IMAGE


@pytest.mark.parametrize("agent", ["oracle", "nop"])
@pytest.mark.parametrize("task", harbor.tasks(TASKS), ids=lambda task: task.name)
async def test_harbors_runner_gives_the_reward_of_ours(
    tmp_path: Path, image: str, task: harbor.Task, agent: str
) -> None:
    ours = await (harbor.solve(task) if agent == "oracle" else play(task, "true"))
    reward = harbors_reward(tmp_path, image, task, agent)
    if (task.name, agent) == (HARBOR_ENDS_NO_AGENT, "oracle"):
        assert (ours.reward, reward) == (1.0, 0.0)
    else:
        assert reward == ours.reward == (agent == "oracle")


def harbors_reward(folder: Path, image: str, task: harbor.Task, agent: str) -> float:
    """The reward of one trial of Harbor's runner, in a container of Podman.

    The task is copied with two changes: the base image, and no `network_mode`, which Harbor does with an image from a registry.
    """
    copy = folder / task.name
    shutil.copytree(task.folder, copy)
    dockerfile, settings = copy / "environment" / "Dockerfile", copy / "task.toml"
    dockerfile.write_text(dockerfile.read_text().replace("FROM debian:12", f"FROM {image}"))
    settings.write_text(settings.read_text().replace('network_mode = "no-network"\n', ""))
    ran = subprocess.run(
        [
            "harbor",
            "run",
            "-p",
            copy,
            "-a",
            agent,
            "-e",
            "podman",
            "-o",
            folder,
            "--job-name",
            "job",
            "-n",
            "1",
            "-q",
            "-y",
        ],
        env={**os.environ, "PATH": PATH, "HARBOR_TELEMETRY": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    files = list((folder / "job").glob("*/result.json"))
    assert len(files) == 1, ran.stdout + ran.stderr
    result = json.loads(files[0].read_text())
    assert result["verifier_result"] is not None, result["exception_info"]
    return read_reward({"reward.json": json.dumps(result["verifier_result"]["rewards"]).encode()})[0]
