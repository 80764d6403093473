"""Targets of a teacher (`art_protocol.wire.TeacherTop`)."""

import base64
from typing import Any

import numpy as np

from art_protocol.wire import TeacherTop
from art_server.shared.trainer_messages import Batch, TaughtSpan, TokenSequence, TrainableTrajectory


def teacher_top(ids: Any, logprobs: Any) -> TeacherTop:
    """The targets with these ids and log-probabilities, each tokens x top_k."""
    packed = [np.asarray(values, dtype=kind) for values, kind in ((ids, "<i4"), (logprobs, "<f4"))]
    token_ids, values = (base64.b64encode(numbers.tobytes()).decode() for numbers in packed)
    return TeacherTop(top_k=packed[0].shape[1], token_ids=token_ids, logprobs=values)


def with_targets(batch: Batch, num_vocabulary: int, seed: int, top_k: int = 5) -> Batch:
    """The batch with random targets for all tokens of every second trajectory."""
    chance = np.random.default_rng(seed)

    def taught(sequence: TokenSequence) -> TokenSequence:
        size = len(sequence.token_ids)
        ids = [chance.permutation(num_vocabulary)[:top_k] for _ in range(size)]
        logprobs = np.log(0.9 * chance.dirichlet([1.0] * top_k, size))
        span = TaughtSpan(start=0, stop=size, top=teacher_top(ids, logprobs))
        # A teacher's log-probabilities are of the whole distribution at temperature 1.
        return sequence.model_copy(update={"taught": [span], "distributions": []})

    def changed(index: int, trajectory: TrainableTrajectory) -> TrainableTrajectory:
        sequences = [taught(sequence) for sequence in trajectory.sequences] if index % 2 else trajectory.sequences
        return trajectory.model_copy(update={"sequences": sequences})

    groups = [
        group.model_copy(
            update={"trajectories": [changed(index, trajectory) for index, trajectory in enumerate(group.trajectories)]}
        )
        for group in batch.groups
    ]
    return batch.model_copy(update={"groups": groups})
