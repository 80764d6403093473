"""The benchmarks that need no engine run, and tell what they say they tell."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[3] / "scripts" / "bench"


def run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCH / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_gate_passes_requests_with_a_simulated_engine() -> None:
    told = run("gate.py", "--requests", "64", "--concurrency", "8")
    assert told["requests_per_second"] > 0
    assert 0 < told["median_ms"] <= told["p99_ms"]
