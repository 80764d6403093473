"""What reward a prompt leads to expect: the baseline of answers that have no siblings.

Some questions get low scores whatever the answer is. Against the mean of a batch all answers to them would count as bad, also the best
one; and an answer that the policy gives only there would be unlearned for the question's sake.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LAST_TOKENS = 256
"""Only the end of a prompt counts: what was asked last."""
NUM_FEATURES = 1024
STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0)
"""Strengths of the regularisation. The mean of the features' squared norms is 1."""


def expected_rewards(prompts: Sequence[Sequence[int]], rewards: Sequence[float]) -> list[float]:
    """For each prompt the reward that the other prompts and rewards predict.

    A ridge regression on which tokens the prompt has (ids modulo NUM_FEATURES), without the prompt's own reward (leave one out), on
    which a baseline must not depend. The strength of the regularisation, one for all, is the one with the least squared error; where no
    strength beats the mean of the other rewards, this mean is what is expected. A single reward is what is expected of itself.

    Source: Sutton and Barto 2018, section 13.4 (a baseline that depends on the state); Hastie, Tibshirani and Friedman 2009, section
    7.10 (leave one out in closed form).
    """
    num = len(rewards)
    if num < 2:
        return list(rewards)
    rewards_N = np.asarray(rewards, np.float64)
    deviations_N = rewards_N - rewards_N.mean()
    errors_N = deviations_N * (num / (num - 1))  # of the mean of the other rewards
    features_ND = _features(prompts)
    left_ND, values_D, _ = np.linalg.svd(features_ND, full_matrices=False)
    for strength in STRENGTHS:
        shrunk_ND = left_ND * (values_D**2 / (values_D**2 + strength))
        leverages_N = 1 / num + (shrunk_ND * left_ND).sum(axis=1)
        of_strength_N = (deviations_N - shrunk_ND @ (left_ND.T @ deviations_N)) / (1 - leverages_N)
        if of_strength_N @ of_strength_N < errors_N @ errors_N:
            errors_N = of_strength_N
    return (rewards_N - errors_N).tolist()


def _features(prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """(prompts, NUM_FEATURES), with mean 0 over prompts."""
    features_ND = np.zeros((len(prompts), NUM_FEATURES))
    for row_D, prompt in zip(features_ND, prompts, strict=True):
        row_D[np.asarray(prompt[-LAST_TOKENS:], np.int64) % NUM_FEATURES] = 1
    features_ND -= features_ND.mean(axis=0)
    norm = np.sqrt((features_ND**2).sum() / len(prompts))
    return features_ND / norm if norm > 0 else features_ND
