"""A short run of what `scripts/chaos` does for hours: kills an engine and a trainer. `test_equal_weights` covers deaths
at named points, without an engine."""

from pathlib import Path

from tests.long.chaos.chaos import Chaos


def test_kills_lose_nothing(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path, seed=29)
    figures = chaos.run(num_kills=2, seconds=300)
    assert figures["steps"] >= 2, figures
