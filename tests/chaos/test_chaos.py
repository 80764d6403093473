"""A short run of what `scripts/chaos` does for hours: an engine and a trainer are killed. Servers that die at named points:
`test_equal_weights`, which needs no engine."""

from pathlib import Path

import pytest

from tests.chaos.chaos import Chaos

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_kills_lose_nothing(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, seed=29)
    figures = chaos.run(num_kills=2, seconds=300)
    assert figures["steps"] >= 2, figures
