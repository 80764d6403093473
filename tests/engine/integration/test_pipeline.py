"""A pipeline on a real vLLM, whose program is killed: no group twice, none too old, each token with its step."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.live import PROJECT, Server, done_jobs
from tests.pipeline_program import check_steps
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]


def run(server: Server, name: str, config: dict[str, Any], folder: Path, killed_after: float = math.inf) -> int:
    """The exit status of a program, which gets SIGKILL as soon as so many of the model's jobs are done."""
    command = [sys.executable, "-m", "tests.pipeline_program", server.url, name, json.dumps(config)]
    with open(folder / "program.log", "ab") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or len(done_jobs(server, PROJECT, name)) >= killed_after)
    finally:
        process.kill()
    return process.wait()


def test_a_killed_pipeline_goes_on_within_its_bound(server: Server, tmp_path: Path) -> None:
    config = {"steps": 8, "groups": 2, "bound": 2, "slow": True}
    name, log = "pipelined", tmp_path / "program.log"
    for killed_after in (2, 5):
        assert run(server, name, config, tmp_path, killed_after) == -signal.SIGKILL, log.read_text()
    assert run(server, name, config, tmp_path) == 0, log.read_text()
    jobs = done_jobs(server, PROJECT, name)
    numbers = check_steps(jobs, server.model_dir(name), config)
    assert numbers != [[2 * step, 2 * step + 1] for step in range(config["steps"])], "slow groups were overtaken"
    assert any(len(job["report"]["sampled_steps"]) > 1 for job in jobs), (
        "tokens of one job were sampled by several steps"
    )
    assert all(job["report"]["turns"].keys() <= {"ledger"} for job in jobs)
