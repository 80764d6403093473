"""Rollouts in containers of Podman, with an image of this machine's own programs."""

import shutil
import socket
from pathlib import Path

import pytest

from art import harbor
from art.harbor.gateway import Gateway
from art.harbor.running import play
from plugins.harbor.tests.boxed import write_task
from plugins.harbor.tests.images import import_image, write_root

pytestmark = pytest.mark.anyio

IMAGE = "localhost/art-harbor-test"
PROGRAMS = ("bash", "sh", "cat", "chmod", "env", "ln", "mkdir", "rm", "setsid", "sleep")
CHECK = '[ "$(cat hello.txt)" = hello ]; echo $((1 - $?)) > /logs/verifier/reward.txt'


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of bash and a few programs with their libraries. Podman's containers have to run here."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    root = tmp_path_factory.mktemp("root")
    write_root(root, PROGRAMS)
    import_image(root, IMAGE)
    return IMAGE


ROLLOUTS = {
    "the work is done": ("echo hello > hello.txt", CHECK, 1.0),
    "nothing is done": ("true", CHECK, 0.0),
    "a daemon": ("setsid sh -c 'sleep 1; echo hello > hello.txt' >/dev/null 2>&1 & exit", f"sleep 2; {CHECK}", 0.0),
    "hangs after its work": ("echo hello > hello.txt; setsid sleep 1000 & sleep 1000", CHECK, 1.0),
    "kills all that it may": ("echo hello > hello.txt; kill -9 -1", CHECK, 1.0),
    "plants a reward": ("echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/verifier/reward.json", CHECK, 0.0),
    "plants links": (
        "rm -rf /logs /tests; ln -s /app /logs; ln -s /app /tests; mkdir -p verifier; echo 1 > verifier/reward.json",
        CHECK,
        0.0,
    ),
    "tests that hang": ("true", "sleep 1000", harbor.TestsTimedOut),
    "no reward": ("true", "true", harbor.RewardInvalid),
    "a link as the reward": ("true", "echo 1 > a; ln -s /app/a /logs/verifier/reward.txt", harbor.RewardInvalid),
}


@pytest.mark.parametrize("name", ROLLOUTS)
async def test_a_rollout_in_a_container(tmp_path: Path, image: str, name: str) -> None:
    command, test, expected = ROLLOUTS[name]
    toml = f"[agent]\ntimeout_sec = 5\n[verifier]\ntimeout_sec = {5 if test == 'sleep 1000' else 60}\n"
    toml += f"[environment]\ndocker_image = '{image}'\nworkdir = '/app'\n"
    (task,) = harbor.tasks(write_task(tmp_path / "task", test, toml=toml))
    if isinstance(expected, type):
        with pytest.raises(expected):
            await play(task, command, sandbox=harbor.Container("podman"))
    else:
        assert (await play(task, command, sandbox=harbor.Container("podman"))).reward == expected
    assert "art-harbor" not in await harbor.Container("podman").call("ps", "--all", "--format", "{{.Names}}")


async def test_the_gateway_answers_in_a_container(tmp_path: Path, image: str) -> None:
    toml = f"[environment]\ndocker_image = '{image}'\nworkdir = '/app'\n"
    (task,) = harbor.tasks(write_task(tmp_path / "task", CHECK, toml=toml))
    with socket.create_server(("127.0.0.1", 0)) as unused:
        gateway = Gateway(f"http://127.0.0.1:{unused.getsockname()[1]}/s/mine", "k")
        ask = "exec 3<>/dev/tcp/127.0.0.1/7623; echo -e 'GET /api/models HTTP/1.1\\r\\n\\r' >&3; cat <&3"
        outcome = await play(task, ask, gateway=gateway, sandbox=harbor.Container("podman"))
    assert "outside_session" in outcome.agent_output
