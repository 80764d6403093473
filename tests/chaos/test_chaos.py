"""A short run of what `scripts/chaos` does for hours."""

from pathlib import Path

import pytest

from tests.chaos.chaos import Chaos

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_kills_lose_nothing(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, seed=21)
    figures = chaos.run(num_kills=4, seconds=300)
    assert figures["steps"] >= 2, figures
