"""Advice about groups that teach nothing: what was seen in their answers, and in the rewards of earlier steps.

Equal rewards at the top are no fault: the prompts are solved.

Wrong advice costs a run: more rollouts change nothing at temperature 0, or for a policy that broke; and a needless roll
back loses a good step. The mean rewards of two batches differ when their prompts differ. So a fall is named only where
the same prompts earn less, or where the answers collapsed, too.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from art_server.jobs.batch_signs import BatchSigns, Past, Rewards, pooled
from art_server.shared.advantages import is_identical
from art_server.shared.trainer_messages import TrainableGroup

ONE_ANSWER = 0.99
"""The mean probability of sampled tokens above which a policy has next to no other answer."""
LOST_ROLLOUTS = 10
"""A fall of the reward is named if this many rollouts lost a whole reward. A smaller fall can be chance."""
STANDARD_ERRORS = 4.0
"""The fall on the same prompts, in standard errors. Honest runs of small batches stay below (`scripts/bench/alarms`)."""
MIN_FALLEN = 3
"""Least number of prompts whose reward fell; in a smaller batch, all prompts. A policy may unlearn one question while it
learns others."""
FALLEN_FOR_RISEN = 4
"""For each prompt that earns more than before, this number of prompts must have fallen."""
MOST, FEW = 0.75, 0.5
"""Shares of the answers that are alike, or cut. Answers became so if this share is at least MOST, and at most FEW in the
batch of the good step."""
SHORTER = 4
"""Answers that became this many times shorter, or cut, collapsed if the policy also became sure of them (ONE_ANSWER), or if they
stay so in a second batch."""
MORE_NATS = 2.0
"""Answers collapsed if the mean log-probability of their tokens fell by this much, as for a policy that writes at random."""

FULL_REWARD = 1.0
"""The highest reward of most tasks. A lower one counts as high only where the run has seen rewards below."""

ADVICE = {
    "copied": "several trajectories have the same choice. Call the model once for each rollout",
    "solved": "all rewards are {highest:g}, the highest so far: these prompts seem solved, and training on them can stop. If an answer "
    "can earn more, sample more rollouts for each group, or use a reward that tells these answers apart",
    "greedy": "all answers are the same, because they were sampled at temperature 0. Sample at temperature 1",
    "collapsed": "all answers are the same, and the policy gave their tokens a probability above 0.99, so it has next to no "
    "other answer. Use other prompts or a higher temperature",
    "same": "all answers are the same, so that nothing tells the better one. Check for one seed for the group or cached answers",
    "batch": "the rewards of all answers are equal, so that nothing tells the better one. Wait for other scores",
    "single": "there is one trajectory, and a reward is compared with the others of its group. Run several rollouts for each",
    "equal": "the answers differ, and their rewards are equal. Sample more rollouts for each group, use other prompts, or a "
    "reward that tells these answers apart",
}
"""By the kind of group (`_seen`)."""


def advise(
    groups: Sequence[tuple[TrainableGroup, bool]],
    *,
    copied: Collection[int | None],
    is_greedy: bool,
    compares_group: bool,
    signs: BatchSigns | None,
    learning_rate: Any,
    past: Past,
) -> list[str]:
    """The notes about a job's groups. With each group comes whether all rewards in the group are equal. `compares_group`: rewards are
    compared within a group, so that a single trajectory teaches nothing.

    `copied` has the numbers of groups in which a choice is in several trajectories. `is_greedy`: tokens were sampled at
    temperature 0. `signs` are the signs of the batch; None for demonstrations.
    """
    told = [pair for pair in groups if compares_group or len(pair[0].trajectories) > 1]
    batches = list(past()) if signs is not None and any(is_equal for _, is_equal in groups) else []
    highest = _highest([group for group, _ in groups], batches)
    seen = Counter(
        _seen(group, copied, is_greedy, highest) for group, is_equal in told if is_equal or is_identical(group)
    )
    if not told and all(is_equal for _, is_equal in groups):
        seen["batch"] = len(groups)
    fall = None
    if signs is not None and 2 * sum(is_equal for _, is_equal in groups) >= len(groups):
        earlier = [batch for batch in batches if batch.step < signs.step]
        fall = _fall_on_same_prompts(signs, earlier) or _collapse(signs, earlier)
    if fall is not None:
        fall += f"; then train with a lower learning_rate than {learning_rate}"
        del seen["collapsed"], seen["equal"]
    notes = [
        f"{seen[kind]} of {len(groups)} groups: {ADVICE[kind].format(highest=highest)}" for kind in ADVICE if seen[kind]
    ]
    return notes if fall is None else [fall, *notes]


def _highest(groups: Sequence[TrainableGroup], batches: Sequence[BatchSigns]) -> float | None:
    """The highest reward of a batch and of the batches before; None if the reward may be low: below FULL_REWARD, and no other
    reward was seen."""
    rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
    highest = max(rewards + [batch.highest for batch in batches if batch.highest is not None], default=0.0)
    is_above_others = min(rewards, default=highest) < highest or any(batch.rewards.mean < highest for batch in batches)
    return highest if is_above_others or highest >= FULL_REWARD else None


def _earns(group: TrainableGroup, highest: float | None) -> bool:
    """Whether each trajectory of a group has the highest reward."""
    return all(trajectory.reward == highest for trajectory in group.trajectories)


def _seen(group: TrainableGroup, copied: Collection[int | None], is_greedy: bool, highest: float | None) -> str:
    """What was seen in a group that teaches nothing: a key of ADVICE."""
    if group.number in copied and is_identical(group):
        return "copied"
    if len(group.trajectories) > 1 and _earns(group, highest):
        return "solved"
    if not is_identical(group):
        return "single" if len(group.trajectories) == 1 else "equal"
    if is_greedy:
        return "greedy"
    logprobs: list[float] = []
    for trajectory in group.trajectories:
        for sequence in trajectory.sequences:
            logprobs += [logprob for logprob in sequence.logprobs if logprob is not None]
    return "collapsed" if logprobs and math.exp(sum(logprobs) / len(logprobs)) > ONE_ANSWER else "same"


def _fall_on_same_prompts(signs: BatchSigns, earlier: Sequence[BatchSigns]) -> str | None:
    """How far the mean reward fell on the prompts that earlier steps answered, too, and how to go back. None if the reward
    did not fall, or if fewer than half of the batch's rollouts have such prompts."""
    before: dict[str, Rewards] = {}
    for prompt in signs.prompts:
        parts = [batch.prompts[prompt] for batch in earlier if prompt in batch.prompts]
        if parts:
            before[prompt] = pooled(parts)
    num_rollouts = sum(signs.prompts[prompt].num for prompt in before)
    if not before or 2 * num_rollouts < signs.rewards.num:
        return None
    fallen = [prompt for prompt in before if _has_halved(before[prompt].mean, signs.prompts[prompt].mean)]
    risen = [prompt for prompt in before if signs.prompts[prompt].mean > before[prompt].mean]
    if len(fallen) < min(MIN_FALLEN, len(signs.prompts)) or len(fallen) < FALLEN_FOR_RISEN * len(risen):
        return None
    was = sum(signs.prompts[prompt].num * before[prompt].mean for prompt in before) / num_rollouts
    now = sum(signs.prompts[prompt].num * signs.prompts[prompt].mean for prompt in before) / num_rollouts
    pairs = [(before[prompt], signs.prompts[prompt]) for prompt in before]
    if not _has_fallen(was, now, num_rollouts) or was - now < STANDARD_ERRORS * _standard_error(pairs):
        return None
    good = [batch.step for batch in earlier if _mean_of(batch, before) > (was + now) / 2]
    if not good:
        return None
    return (
        f"{num_rollouts} rollouts have prompts that earlier steps answered, too: their mean reward was {was:.3g}, and is "
        f"{now:.3g} with the answers of step {signs.step}. If the reward function is the same, the policy broke: `await "
        f"model.rollback({max(good)})` goes back to the last step that earned more"
    )


def _collapse(signs: BatchSigns, earlier: Sequence[BatchSigns]) -> str | None:
    """How the answers collapsed since an earlier step that earned more than twice as much, and how to go back; None if
    the answers did not collapse."""
    best = max((batch.rewards.mean for batch in earlier), default=-math.inf)
    mean = signs.rewards.mean
    if not earlier or not _has_fallen(best, mean, signs.rewards.num):
        return None
    good = max((batch for batch in earlier if batch.rewards.mean > (best + mean) / 2), key=lambda batch: batch.step)
    changes: list[str] = []
    if len(signs.prompts) > 1 and signs.commonest >= MOST and good.commonest <= FEW:
        changes.append(
            f"{signs.commonest:.0%} of the answers are the same one, to different prompts ({good.commonest:.0%})"
        )
    are_cut, are_shorter = _are_cut(signs, good), _are_shorter(signs, good)
    lengths: list[str] = []
    if are_cut:
        lengths.append(f"{signs.cut:.0%} of the answers are cut at their length limit ({good.cut:.0%})")
    if are_shorter:
        lengths.append(f"an answer has {signs.num_tokens:.3g} tokens on average ({good.num_tokens:.3g})")
    if signs.surprise is not None and good.surprise is not None:
        now, was = math.exp(-signs.surprise), math.exp(-good.surprise)
        if signs.surprise >= good.surprise + MORE_NATS or (lengths and now > ONE_ANSWER >= was):
            changes.append(f"the probability of a sampled token is {now:.2g} ({was:.2g})")
    # The answers to the prompts of one batch may have another length, but not those of several batches.
    previous = earlier[-1]
    are_again = (are_cut and _are_cut(previous, good)) or (are_shorter and _are_shorter(previous, good))
    if not changes and not are_again:
        return None
    return (
        f"the answers collapsed: {', and '.join([*changes, *lengths])}; in brackets those of step {good.step}, which earned "
        f"{good.rewards.mean:.3g} on average where those of step {signs.step} earn {mean:.3g}. `await "
        f"model.rollback({good.step})` goes back"
    )


def _are_cut(signs: BatchSigns, good: BatchSigns) -> bool:
    return signs.cut >= MOST and good.cut <= FEW


def _are_shorter(signs: BatchSigns, good: BatchSigns) -> bool:
    return signs.num_tokens * SHORTER <= good.num_tokens


def _has_halved(before: float, after: float) -> bool:
    return after < before and after <= before - abs(before) / 2


def _has_fallen(before: float, after: float, num_rollouts: int) -> bool:
    """Whether a mean reward halved, and LOST_ROLLOUTS lost theirs."""
    lost = (before - after) / max(1.0, abs(before), abs(after))
    return _has_halved(before, after) and lost * num_rollouts >= LOST_ROLLOUTS


def _standard_error(pairs: Sequence[tuple[Rewards, Rewards]]) -> float:
    """The standard error of the mean difference between prompts' rewards before and after, estimated from the deviation of
    rollouts from their own prompt's mean. A prompt counts as often as the later batch has rollouts of this prompt."""
    num_after = sum(after.num for _, after in pairs)
    degrees = sum(before.num + after.num - 2 for before, after in pairs)
    if degrees <= 0:
        return 0.0
    variance = sum(before.squares + after.squares for before, after in pairs) / degrees
    return math.sqrt(variance * sum(after.num + after.num**2 / before.num for before, after in pairs)) / num_after


def _mean_of(batch: BatchSigns, prompts: Collection[str]) -> float:
    """The mean reward of these prompts in a batch; minus infinity if the batch has none of them."""
    parts = [rewards for prompt, rewards in batch.prompts.items() if prompt in prompts]
    return pooled(parts).mean if parts else -math.inf
