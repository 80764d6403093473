"""An engine that computes another policy than the trainer: the step does not serve, and nothing is trained from it.

The faults are planted in files that the engine reads again when it restarts; the trainer has its own copy in memory.
"""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_server.store.base_models import TINY_DIR
from tests.live import PROJECT, READY_SECONDS, Server, find_process, register, train_one_step

ENGINE = "art_server.engine.vllm_process.child"


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_bytes()) | fields))


def restart_engine(server: Server, client: httpx.Client) -> None:
    def num_starts() -> float:
        (line,) = (
            line for line in client.get("/metrics").text.splitlines() if line.startswith("art_engine_starts_total ")
        )
        return float(line.rpartition(" ")[2])

    before = num_starts()
    os.kill(find_process(server, ENGINE), signal.SIGKILL)
    deadline = time.monotonic() + READY_SECONDS
    while num_starts() == before or client.get("/ready").status_code != 200:
        assert time.monotonic() < deadline, server.log_tail()
        time.sleep(0.1)


def ask(client: httpx.Client) -> tuple[int, str | None]:
    """Status and error code of a request to the model."""
    body = {"model": f"{PROJECT}/a", "prompt": [3, 4], "max_tokens": 1}
    answer = client.post("/v1/completions", json=body)
    return answer.status_code, answer.json().get("error", {}).get("code")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_alpha_and_another_rope_are_caught_before_the_step_serves(dtype: str, tmp_path: Path) -> None:
    base = shutil.copytree(TINY_DIR, tmp_path / "base")
    server = Server(tmp_path)
    server.arguments = ["--base-model", str(base), "--max-seq-length", "1024", "--dtype", dtype]
    server.start()
    try:
        server.wait_ready()
        register(server, "a", base_model=str(base))
        assert train_one_step(server, "a")["step"] == 1
        adapter = server.model_dir("a") / "checkpoints" / "0001" / "adapter_config.json"
        right = (200, None)
        with server.client() as client:
            assert ask(client) == right
            change(adapter, lora_alpha=32.0)
            restart_engine(server, client)
            assert ask(client) == (400, "policy_differs")
            change(adapter, lora_alpha=16.0)
            assert ask(client) == right
            config = base / "config.json"
            change(config, rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
            restart_engine(server, client)
            assert ask(client) == (400, "policy_differs")
    finally:
        server.stop()
