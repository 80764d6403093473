"""An example trains on two machines that have joined, with folders of their own. The machine that has a rank only is killed on
the way; `scripts/chaos --hosts` kills machines with engines, too. Real vLLM."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.live import Server, joined_host
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
STEPS, LOST_AT = 12, 4


def running_in(folder: Path) -> list[psutil.Process]:
    """The processes that work in a folder."""
    processes: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to(folder) and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


def test_an_example_trains_on_two_machines_and_loses_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("user infer,train\njoins host\n")
    flags = ["--base-model", "art/tiny", "--engines", "0", "--ranks", "0", "--api-key-file", str(keys)]
    server = Server(tmp_path, arguments=flags)
    server.start()
    with contextlib.ExitStack() as stack:
        stack.callback(server.stop)
        lost = stack.enter_context(joined_host(server, tmp_path, "lost", num_engines=0))
        stack.enter_context(joined_host(server, tmp_path, "kept", num_engines=1))
        server.wait_ready()
        command = [sys.executable, str(ROOT / "examples" / "yes_no_maybe.py"), "--server", server.url]
        program = subprocess.Popen(
            [*command, "--steps", str(STEPS)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            env={**os.environ, "ART_API_KEY": "user"},
            text=True,
        )
        stack.callback(program.kill)
        checkpoints = tmp_path / "art" / "yes-no-maybe" / "models" / "art-tiny" / "checkpoints"
        wait_until(lambda: (checkpoints / f"{LOST_AT:04}").exists() or program.poll() is not None, server.log_tail)
        os.kill(lost.pid, signal.SIGKILL)
        told, _ = program.communicate()
        assert program.returncode == 0, told + server.log_tail()
        assert (checkpoints / f"{STEPS:04}").exists() and not (checkpoints / f"{STEPS + 1:04}").exists()
        first, last = re.findall(r"first step ([\d.]+), last three steps ([\d.]+)", told)[0]
        assert float(last) > float(first), told
        wait_until(lambda: not running_in(tmp_path / "lost"), lambda: str(running_in(tmp_path / "lost")))
        assert not [*(tmp_path / "kept").glob("*/*/.*")], "no half folder"
    wait_until(lambda: not running_in(tmp_path), lambda: str(running_in(tmp_path)))
