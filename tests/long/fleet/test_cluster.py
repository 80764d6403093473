"""An example trains on hosts that Ray has placed, while Ray's head is killed, and on two machines of a Ray that was there before.
Real Ray, real vLLM."""

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.live import Server
from tests.waiting import wait_until

pytest.importorskip("ray", reason="needs the extra `cluster`")

ROOT = Path(__file__).parents[3]
STEPS, LOST_AT = 20, 5
USUAL_RISE = 0.15


TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray of two machines, with two processors and one, which are one machine."""
    token = tmp_path / "token"
    token.write_text("0" * 32 + "f" * 32)
    token.chmod(0o600)
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_worker_niceness": "0"}
    for name, value in {**variables, "RAY_USAGE_STATS_ENABLED": "0"}.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", TWO_NODES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster:
        assert cluster.stdin is not None and cluster.stdout is not None
        yield cluster.stdout.readline().strip()
        cluster.stdin.close()


def test_an_example_trains_on_two_machines_of_a_ray_that_is_there(two_nodes: str, tmp_path: Path) -> None:
    flags = ["--base-model", "art/tiny", "--cluster", two_nodes, "--engines", "2", "--ranks", "1"]
    server = Server(tmp_path, arguments=flags)
    with server.running():
        assert server.process is not None
        assert "site-packages/ray/" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        told = subprocess.run(example(server), cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        engines = [replica["name"] for replica in httpx.get(f"{server.url}/health", timeout=30).json()["replicas"]]
    first, last = rewards(told)
    assert last > first + USUAL_RISE, told
    assert sorted(engines) == ["engine-ray-engine-0-0", "engine-ray-engine-1-0"]
    log = (tmp_path / "art" / "logs" / "ray.log").read_text()
    assert len(set(re.findall(r"placed on (\w{8})", log))) == 2, log


REFUSED = {
    "too many engines": ([], ["--engines", "9"], {}, r"9 engines with 1 CPU each.*and Ray has [12] CPU and [12] CPU"),
    "ranks on no machine": ([], ["--ranks", "3"], {}, r"3 ranks 3 CPU on one machine, and Ray has"),
    "another token": ([], [], {"RAY_AUTH_TOKEN": "f" * 64}, r"check address and token|the same token"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_ray_can_never_place_ends_the_server(two_nodes: str, tmp_path: Path, case: str) -> None:
    _, flags, environment, sentence = REFUSED[case]
    arguments = [
        "--path",
        str(tmp_path / "art"),
        "--port",
        "0",
        "--inference-port",
        "0",
        "--cluster",
        two_nodes,
        *flags,
    ]
    command = [sys.executable, "-m", "art_server", *arguments]
    done = subprocess.run(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert re.search(sentence, done.stderr), done.stderr


def example(server: Server) -> list[str]:
    command = [sys.executable, str(ROOT / "examples" / "yes_no_maybe.py"), "--server", server.url]
    return [*command, "--steps", str(STEPS)]


def rewards(told: str) -> tuple[float, float]:
    """Of the first step and of the last three, as the example prints them."""
    first, last = re.findall(r"first step ([\d.]+), last three steps ([\d.]+)", told)[0]
    return float(first), float(last)


def running(*words: str) -> list[psutil.Process]:
    """The processes of the server's Ray and its hosts: their command lines name its folders."""
    processes: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if all(word in line for word in words) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def test_an_example_trains_where_ray_places_and_outlives_rays_head(tmp_path: Path) -> None:
    flags = ["--base-model", "art/tiny", "--cluster", "auto", "--engines", "2", "--ranks", "1"]
    server = Server(tmp_path, arguments=flags)
    server.start()
    folder = (tmp_path / "art" / ".server").resolve()
    number = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        server.wait_ready()
        assert server.process is not None
        assert "site-packages/ray/" not in Path(f"/proc/{server.process.pid}/maps").read_text(), (
            "the server never imports Ray"
        )
        for process in running(number):
            assert "Bearer" not in str(process.cmdline())
        program = subprocess.Popen(example(server), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        stack.callback(program.kill)
        checkpoints = tmp_path / "art" / "yes-no-maybe" / "models" / "art-tiny" / "checkpoints"
        wait_until(lambda: (checkpoints / f"{LOST_AT:04}").exists() or program.poll() is not None, server.log_tail)
        (head,) = running("gcs_server", number)
        os.kill(head.pid, signal.SIGKILL)

        def engine() -> str:
            return httpx.get(f"{server.url}/health", timeout=30).json()["engine"]

        wait_until(lambda: engine() == "starting", server.log_tail)
        wait_until(lambda: engine() == "ready", server.log_tail)
        told, _ = program.communicate()
        assert program.returncode == 0, told + server.log_tail()
        assert (checkpoints / f"{STEPS:04}").exists() and not (checkpoints / f"{STEPS + 1:04}").exists()
        first, last = rewards(told)
        assert last > first, told
    wait_until(lambda: not running(number), lambda: str(running(number)))
