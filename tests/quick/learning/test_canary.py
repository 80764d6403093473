"""What a canary's scores decide: the formula by hand, and the rates of wrong decisions in simulated canaries."""

import math

import pytest

from art_server.learning.canary import Opinion, arm_of, capped, is_promoted, look
from tests.makers.canaries import POLICY, simulate


def opinions(rewards: dict[str, list[float]]) -> list[Opinion]:
    return [Opinion(user, reward) for user, of_user in rewards.items() for reward in of_user]


def test_a_mean_has_the_variance_of_its_users() -> None:
    arm = arm_of(opinions({"a": [1, 1, 1], "b": [0], "c": [1, 0]}))
    assert (arm.num_scored, arm.num_users, arm.mean) == (6, 3, pytest.approx(4 / 6))
    # residuals of the users' sums: 3 - 3 * 2/3 = 1, 0 - 2/3, 1 - 2 * 2/3 = -1/3
    assert arm.variance == pytest.approx(3 / 2 * (1 + 4 / 9 + 1 / 9) / 36)


def test_with_an_opinion_for_each_user_the_variance_is_the_usual_one() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    arm = arm_of(opinions({str(number): [reward] for number, reward in enumerate(rewards)}))
    mean = sum(rewards) / 5
    assert arm.variance == pytest.approx(sum((reward - mean) ** 2 for reward in rewards) / 4 / 5)


def test_a_few_users_decide_nothing() -> None:
    seen = look(
        opinions({str(number): [0.0] for number in range(90)}), opinions({str(number): [1.0] for number in range(4)})
    )
    assert seen.z is None and is_promoted(seen, 1, POLICY) is None


def test_users_who_all_agree_decide() -> None:
    none = opinions({str(number): [0.0] for number in range(90)})
    seen = look(none, opinions({f"n{number}": [1.0] for number in range(30)}))
    assert seen.z == math.inf and is_promoted(seen, 1, POLICY) is True


def test_a_user_counts_for_a_share_only() -> None:
    pushy = [Opinion("pushy", 0.0)] * 60
    assert len(capped([*pushy, Opinion("other", 1.0)], 5)) == 6


def share_promoted(difference: float, runs: int = 200, **more: float) -> float:
    return sum(simulate(difference, seed=seed, **more)[0] for seed in range(runs)) / runs  # type: ignore[arg-type]


def test_a_worse_step_is_rolled_back_and_a_better_one_promoted() -> None:
    assert share_promoted(-0.1) <= 0.05
    assert share_promoted(0.1) >= 0.95
    assert share_promoted(-0.2, 100) == 0.0


def test_a_drift_of_all_users_changes_nothing() -> None:
    assert 0.35 < share_promoted(0.0, drift=0.1) < 0.65
    assert share_promoted(-0.1, drift=0.2) <= 0.05


def test_users_with_rates_of_their_own_do_not_decide_early() -> None:
    early = [simulate(0.0, seed=seed, per_user=10, spread=0.3) for seed in range(200)]
    assert sum(is_better and number < POLICY.looks[-1] for is_better, number in early) / 200 <= 0.04
