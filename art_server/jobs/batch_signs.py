"""What the answers and rewards of a batch show. A job's row keeps these signs, with which later batches are compared
(`advice.py`)."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from art_server.shared.advantages import sampled_ids, trained_positions
from art_server.shared.trainer_messages import Batch, TrainableTrajectory


class Rewards(BaseModel):
    """Rewards of several rollouts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num: int
    mean: float
    squares: float
    """The sum of the rewards' squared differences from the mean."""


class BatchSigns(BaseModel):
    """The signs of one batch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    """The step that sampled most of the tokens."""
    rewards: Rewards
    """The rewards of all trajectories."""
    highest: float | None = None
    """The highest of these rewards; None in rows of an earlier version."""
    prompts: dict[str, Rewards]
    """The rewards of the trajectories that begin with the same prompt, by the prompt's digest."""
    commonest: float
    """The share of the trajectories that have the most frequent answer."""
    cut: float
    """The share of the trajectories that were cut at a length limit."""
    num_tokens: float
    """Sampled tokens of a trajectory, on average."""
    surprise: float | None
    """Minus the mean log-probability of the sampled tokens, in nats; None if no log-probability is known."""


Past = Callable[[], Sequence[BatchSigns]]
"""The signs of the batches from which the model's steps were trained, in the order of the steps."""


def signs_of(batch: Batch, sampled_steps: Mapping[int, int]) -> BatchSigns | None:
    """The signs of a batch; None if no token is known to be the model's (demonstrations).

    `sampled_steps`: the number of tokens by the step that sampled them.
    """
    trajectories: list[TrainableTrajectory] = []
    for group in batch.groups:
        trajectories += [trajectory for trajectory in group.trajectories if any(sampled_ids(trajectory))]
    if not trajectories or not sampled_steps:
        return None
    prompts: dict[str, list[float]] = {}
    answers: Counter[tuple[tuple[int, ...], ...]] = Counter()
    for trajectory in trajectories:
        prompts.setdefault(_prompt_digest(trajectory), []).append(trajectory.reward)
        answers[tuple(map(tuple, sampled_ids(trajectory)))] += 1
    logprobs = [logprob for trajectory in trajectories for logprob in _known_logprobs(trajectory)]
    num_tokens = sum(len(tokens) * count for answer, count in answers.items() for tokens in answer)
    num_cut = sum(any(sequence.truncated for sequence in trajectory.sequences) for trajectory in trajectories)
    return BatchSigns(
        step=max(sampled_steps, key=lambda step: (sampled_steps[step], step)),
        rewards=_rewards([trajectory.reward for trajectory in trajectories]),
        highest=max(trajectory.reward for trajectory in trajectories),
        prompts={digest: _rewards(rewards) for digest, rewards in prompts.items()},
        commonest=max(answers.values()) / len(trajectories),
        cut=num_cut / len(trajectories),
        num_tokens=num_tokens / len(trajectories),
        surprise=-sum(logprobs) / len(logprobs) if logprobs else None,
    )


def pooled(parts: Sequence[Rewards]) -> Rewards:
    """The rewards of all parts together."""
    num = sum(part.num for part in parts)
    mean = sum(part.num * part.mean for part in parts) / num
    squares = sum(part.squares + part.num * (part.mean - mean) ** 2 for part in parts)
    return Rewards(num=num, mean=mean, squares=squares)


def _rewards(rewards: Sequence[float]) -> Rewards:
    mean = sum(rewards) / len(rewards)
    return Rewards(num=len(rewards), mean=mean, squares=sum((reward - mean) ** 2 for reward in rewards))


def _prompt_digest(trajectory: TrainableTrajectory) -> str:
    """The digest of the tokens before the first sampled token."""
    sequence = next(sequence for sequence in trajectory.sequences if trained_positions(sequence))
    prompt = sequence.token_ids[: trained_positions(sequence)[0]]
    return hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8).hexdigest()


def _known_logprobs(trajectory: TrainableTrajectory) -> Iterator[float]:
    for sequence in trajectory.sequences:
        yield from (logprob for logprob in sequence.logprobs if logprob is not None)
