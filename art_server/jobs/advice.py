"""Advice about groups that teach nothing: what was seen in their answers, and in the rewards of earlier steps.

Advice that does not fit costs a run: more rollouts change nothing at temperature 0, or for a policy that broke.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from art_server.process.shared.advantages import is_identical
from art_server.process.shared.trainer_messages import TrainableGroup

Past = Callable[[], Mapping[int, float]]
"""The mean reward of each kept step's answers."""

ONE_ANSWER = 0.99
"""The mean probability of sampled tokens above which a policy has next to no other answer."""
LOST_ROLLOUTS = 10
"""A fall of the reward is named if this many rollouts lost a whole reward. A smaller one can be chance."""

ADVICE = {
    "copied": "several trajectories have the same choice. Call the model once for each rollout",
    "greedy": "all answers are the same, because they were sampled at temperature 0. Sample at temperature 1",
    "collapsed": "all answers are the same, and the policy gave their tokens a probability above 0.99, so it has next to no "
    "other answer. Use other prompts or a higher temperature; if it had more answers before, `await model.rollback(STEP)` and "
    "a lower learning_rate help",
    "same": "all answers are the same, so that nothing tells the better one. Check for one seed for the group or cached answers",
    "single": "there is one trajectory, and a reward is compared with the others of its group. Run several rollouts for each",
    "equal": "the answers differ, and their rewards are equal. Sample more rollouts for each group, use other prompts, or a "
    "reward that tells these answers apart",
}
"""By what was seen in a group."""


def advise(
    groups: Sequence[tuple[TrainableGroup, bool]],
    *,
    copied: Collection[int | None],
    is_greedy: bool,
    sampled_step: int,
    learning_rate: Any,
    past: Past,
) -> list[str]:
    """The notes about a job's groups, of which each comes with whether all its rewards are equal.

    `copied` has the numbers of groups in which a choice is in several trajectories. `is_greedy`: tokens were sampled at
    temperature 0. `sampled_step` sampled the answers.
    """
    seen = Counter(_seen(group, copied, is_greedy) for group, is_equal in groups if is_equal or is_identical(group))
    fall = None
    if 2 * sum(is_equal for _, is_equal in groups) >= len(groups):
        rewards = [trajectory.reward for group, _ in groups for trajectory in group.trajectories]
        fall = _fall(rewards, sampled_step, {step: mean for step, mean in past().items() if step < sampled_step})
    if fall is not None:
        fall += f"; then train with a lower learning_rate than {learning_rate}"
        del seen["collapsed"], seen["equal"]
    notes = [f"{seen[kind]} of {len(groups)} groups: {ADVICE[kind]}" for kind in ADVICE if seen[kind]]
    return notes if fall is None else [fall, *notes]


def _seen(group: TrainableGroup, copied: Collection[int | None], is_greedy: bool) -> str:
    if not is_identical(group):
        return "single" if len(group.trajectories) == 1 else "equal"
    if group.number in copied:
        return "copied"
    if is_greedy:
        return "greedy"
    logprobs: list[float] = []
    for trajectory in group.trajectories:
        for sequence in trajectory.sequences:
            logprobs += [each for each in sequence.logprobs if each is not None]
    return "collapsed" if logprobs and math.exp(sum(logprobs) / len(logprobs)) > ONE_ANSWER else "same"


def _fall(rewards: Sequence[float], sampled_step: int, earlier: Mapping[int, float]) -> str | None:
    """How far the mean reward fell since an earlier step, and how to go back to it; None if it did not."""
    if not earlier:
        return None
    best, mean = max(earlier.values()), sum(rewards) / len(rewards)
    lost = (best - mean) / max(1.0, abs(best), abs(mean))
    if mean > best - abs(best) / 2 or lost * len(rewards) < LOST_ROLLOUTS:
        return None
    last = max(step for step, reward in earlier.items() if reward > (best + mean) / 2)
    return (
        f"the mean reward was {earlier[last]:.3g} with the answers of step {last}, and is {mean:.3g} with those of step "
        f"{sampled_step}. If the prompts are as hard as before, the policy broke: `await model.rollback({last})` goes back"
    )
