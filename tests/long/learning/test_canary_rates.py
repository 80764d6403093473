"""A thousand simulated canaries of each kind: how often a step that is worse, equal or better is promoted, and after how many scores."""

import statistics
from typing import Any

import pytest

from tests.makers.canaries import POLICY, simulate

RUNS = 1000
KINDS: dict[str, tuple[dict[str, Any], float, float]] = {
    "worse by 0.2": ({"difference": -0.2}, 0.0, 0.001),
    "worse by 0.1": ({"difference": -0.1}, 0.0, 0.02),
    "worse by 0.05": ({"difference": -0.05}, 0.0, 0.13),
    "equal": ({"difference": 0.0}, 0.45, 0.55),
    "better by 0.05": ({"difference": 0.05}, 0.87, 1.0),
    "better by 0.1": ({"difference": 0.1}, 0.98, 1.0),
    "equal, all users fall by 0.1": ({"difference": 0.0, "drift": 0.1}, 0.45, 0.55),
    "worse by 0.1, all users fall by 0.2": ({"difference": -0.1, "drift": 0.2}, 0.0, 0.02),
    "better by 0.1, all users fall by 0.2": ({"difference": 0.1, "drift": 0.2}, 0.98, 1.0),
    "equal, ten scores of each user": ({"difference": 0.0, "per_user": 10, "spread": 0.3}, 0.4, 0.6),
}
"""Arguments of `simulate`, and the least and the largest share of promoted steps."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_rates_of_decisions(kind: str) -> None:
    arguments, least, most = KINDS[kind]
    runs = [simulate(**arguments, seed=seed) for seed in range(RUNS)]
    promoted = statistics.fmean(is_better for is_better, _ in runs)
    early = statistics.fmean(is_better and number < POLICY.looks[-1] for is_better, number in runs)
    scores = statistics.fmean(number for _, number in runs)
    print(f"| {kind} | {promoted:.3f} | {early:.3f} | {scores:.0f} |")
    assert least <= promoted <= most
    if arguments["difference"] == 0.0:
        assert early <= 0.03, "an equal step is promoted before the last look by chance only"
