"""A minute of load with malformed bodies, a large job and a killed engine: no request is lost."""

import json
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_SECONDS

LOAD = Path(__file__).parents[3] / "scripts" / "bench" / "load"
MAY_HAPPEN = {"200", "hostile: 413", "hostile: 422", "steps", "stream ended by the engine's death"}
MAX_MB_MORE = 100
"""A minute shows only gross leaks, because jobs of 76 MB come and go; the slope needs ten minutes."""


def test_a_minute_of_load_loses_nothing() -> None:
    command = [sys.executable, str(LOAD), "--seconds", "60", "--connections", "500"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[0])
    assert figures["answers"].keys() <= MAY_HAPPEN, figures
    assert figures["answers"]["200"] > 100 and figures["answers"]["steps"] >= 1, figures
    assert figures["faults"] == {}, figures
    earlier, later = figures["memory_mb"][:-3], figures["memory_mb"][-3:]
    assert min(later) < max(earlier) + MAX_MB_MORE, figures
