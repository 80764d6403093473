"""The GPU's checks run to their end at toy size."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_SECONDS

BENCH = Path(__file__).parents[3] / "scripts" / "bench"


def test_gpu_check_runs_to_its_end_without_a_gpu(tmp_path: Path) -> None:
    """At toy size on a CPU every check runs, and none claims to have seen a device."""
    out = tmp_path / "gpu.jsonl"
    command = [sys.executable, str(BENCH.parent / "gpu-check"), "--toy", "--out", str(out)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    only = "equality,compiles,memory,block_mask,lora,trees,walk,transfer,retry,unsloth"
    done = subprocess.run(
        [*command, "--only", only], capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["check"] for line in lines} == set(only.split(","))
    assert [line for line in lines if line["ok"] is not None] == []
    for line in lines:
        assert line.get("gradient_distance", 0.0) < 0.05, line
        assert line.get("is_equal", True) and line.get("is_shared", True), line
    again = subprocess.run(
        [*command, "--only", only], capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=environment
    )
    assert again.returncode == 0 and len(out.read_text().splitlines()) == len(lines), "resumable"
