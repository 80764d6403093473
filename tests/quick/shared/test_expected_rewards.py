import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_protocol.wire import TrainConfig
from art_server.shared import expected_rewards as module
from art_server.shared.advantages import trained_tokens
from art_server.shared.expected_rewards import expected_rewards
from art_server.shared.trainer_messages import TokenSequence, TrainableGroup, TrainableTrajectory


def answer(prompt: list[int], word: int, reward: float) -> TrainableGroup:
    logprobs = [*[None] * len(prompt), -1.0]
    sequence = TokenSequence(token_ids=[*prompt, word], logprobs=logprobs)
    return TrainableGroup(trajectories=[TrainableTrajectory(reward=reward, sequences=[sequence])])


def advantages(groups: list[TrainableGroup], **options: str) -> list[float | None]:
    config = TrainConfig.model_validate({"baseline": "similar_prompts", "scaling": "none", **options})
    return [None if tokens is None else tokens[0][0][0][1] for tokens in trained_tokens(groups, config)]


def fitted(prompts: list[list[int]], rewards: list[float], strength: float) -> list[float]:
    """The definition: for each prompt a regression on the others, with an intercept without regularisation."""
    features = module._features(prompts)
    predictions: list[float] = []
    for left_out in range(len(rewards)):
        others = [index for index in range(len(rewards)) if index != left_out]
        design = np.column_stack([np.ones(len(others)), features[others]])
        penalty = np.diag([0.0, *[strength] * features.shape[1]])
        weights = np.linalg.solve(
            design.T @ design + penalty, design.T @ np.array([rewards[index] for index in others])
        )
        predictions.append(float(weights @ [1.0, *features[left_out]]))
    return predictions


@pytest.mark.parametrize("strength", module.STRENGTHS)
def test_leaving_out_in_closed_form_equals_a_regression_for_each_prompt(monkeypatch, strength) -> None:
    monkeypatch.setattr(module, "STRENGTHS", (strength,))
    monkeypatch.setattr(module, "NUM_FEATURES", 12)
    dice = random.Random(1)
    prompts = [[dice.randrange(24) for _ in range(4)] for _ in range(40)]
    rewards = [len({token % 12 for token in prompt} & {1, 2, 3, 5}) + 0.1 * dice.random() for prompt in prompts]
    assert expected_rewards(prompts, rewards) == pytest.approx(fitted(prompts, rewards, strength), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 200_000), max_size=400), st.floats(-1e3, 1e3)), min_size=2, max_size=20)
)
def test_what_is_expected_predicts_no_worse_than_the_mean_of_the_others(answers: list[tuple[list[int], float]]) -> None:
    rewards = np.array([reward for _, reward in answers])
    expected = np.array(expected_rewards([prompt for prompt, _ in answers], rewards.tolist()))
    means = (rewards.sum() - rewards) / (len(rewards) - 1)
    assert np.isfinite(expected).all()
    assert ((rewards - expected) ** 2).sum() <= ((rewards - means) ** 2).sum() * (1 + 1e-9)


def test_of_equal_prompts_the_mean_of_the_others_is_expected() -> None:
    assert expected_rewards([[1, 2]] * 3, [0.0, 1.0, 5.0]) == pytest.approx([3.0, 2.5, 0.5])
    assert expected_rewards([[1, 2]], [4.0]) == [4.0]
    assert expected_rewards([], []) == []


def test_the_best_answer_to_a_question_with_severe_users_is_good() -> None:
    """Against the batch's mean of .5 it is not, and the habitual answer to the other question is (Simpson's paradox)."""
    kind, severe, no, maybe = [1, 2, 3], [1, 2, 4], 8, 9
    batch = [answer(kind, no, float(number < 15)) for number in range(20)]  # .75
    batch += [answer(severe, no, float(number < 2)) for number in range(10)]  # .2
    batch += [answer(severe, maybe, float(number < 4)) for number in range(10)]  # .4

    def means(values: list[float | None]) -> list[float]:
        return [float(np.mean([value or 0.0 for value in part])) for part in (values[:20], values[20:30], values[30:])]

    kind_no, severe_no, severe_maybe = means(advantages(batch))
    assert severe_maybe > 0.05 and severe_no < -0.05
    assert abs(kind_no) < 0.05
    kind_no, severe_no, severe_maybe = means(advantages(batch, baseline="none", scaling="batch_std"))
    assert severe_maybe < 0 < kind_no


@pytest.mark.parametrize("scaling", ["none", "batch_std"])
def test_equal_rewards_have_no_signal(scaling) -> None:
    batch = [answer([1, number], 5, 0.1) for number in range(4)]
    assert advantages(batch, scaling=scaling) == [None] * 4


def test_batch_std_divides_what_is_above_the_expected() -> None:
    batch = [answer([1, 2], 5, reward) for reward in (0.0, 1.0, 5.0)]
    # Expected 3, 2.5, .5: differences -3, -1.5, 4.5, mean 0, variance (9 + 2.25 + 20.25) / 3.
    std = 10.5**0.5
    assert advantages(batch, scaling="batch_std") == pytest.approx([-3 / std, -1.5 / std, 4.5 / std], rel=1e-5)


def test_a_scaling_within_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="scaling='batch_std' or 'none'"):
        TrainConfig(baseline="similar_prompts")
