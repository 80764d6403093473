"""A training run without a model: a policy that answers each question rightly with a probability, and learns from the
rewards, as GRPO would have it learn. What is simulated is the chance in small batches; the advice is the server's own."""

import math
import random

from art_server.jobs.advice import advise
from art_server.jobs.batch_signs import BatchSigns, signs_of
from art_server.shared.trainer_messages import Batch, TokenSequence, TrainableGroup, TrainableTrajectory

NUM_WRONG = 6
"""Wrong answers to a question."""
PART = 0.1
"""Wrong answers earn none, one or two of these."""


class SimulatedRun:
    """A run whose questions are of four kinds, of which some are hard. One draw of `random` decides everything."""

    def __init__(
        self,
        draw: random.Random,
        num_questions: int = 32,
        num_groups: int = 6,
        num_rollouts: int = 8,
        *,
        has_parts: bool | None = None,
    ):
        """`has_parts`: whether wrong answers earn a part of the reward; None leaves this to chance."""
        self.draw = draw
        self.num_groups, self.num_rollouts = num_groups, num_rollouts
        kinds = [draw.gauss(-1.5, 1.5) for _ in range(4)]
        self.logits = {question: kinds[question % 4] + draw.gauss(0, 1) for question in range(num_questions)}
        """Of the probability that a question is answered rightly."""
        self.learning_rate = draw.choice((0.0, 0.3, 1.0, 3.0))
        self.wandering = draw.choice((0.0, 0.2, 0.5))
        """How far each step moves a question for no reason, up or down."""
        self.has_parts = draw.random() < 0.5 if has_parts is None else has_parts
        self.rewards: list[float] = []
        """Of the newest batch."""
        self.past: list[BatchSigns] = []

    def step(self) -> list[str]:
        """Samples a batch and learns from it. Returns the advice about the batch."""
        questions = self.draw.sample(sorted(self.logits), self.num_groups)
        groups = [self._group(number, question) for number, question in enumerate(questions)]
        signs = signs_of(Batch(groups=groups), {len(self.past): 1})
        assert signs is not None
        are_equal = [len({trajectory.reward for trajectory in group.trajectories}) == 1 for group in groups]
        notes = advise(
            list(zip(groups, are_equal, strict=True)),
            copied=(),
            is_greedy=False,
            compares_group=True,
            signs=signs,
            learning_rate=self.learning_rate,
            past=lambda: self.past,
        )
        self.past = [*self.past, signs]
        self.rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
        for question, is_equal in zip(questions, are_equal, strict=True):
            if not is_equal:
                self._learn(question)
        for question in self.logits:
            self.logits[question] += self.draw.gauss(0, self.wandering)
        return notes

    def _learn(self, question: int) -> None:
        """A question moves, and those of its kind with it, now and then in the wrong direction."""
        for other in self.logits:
            if other % 4 == question % 4:
                share = 1.0 if other == question else 0.3
                self.logits[other] += share * self.learning_rate * self.draw.gauss(0.5, 0.5)

    def _group(self, number: int, question: int) -> TrainableGroup:
        right = 1 / (1 + math.exp(-self.logits[question]))
        trajectories: list[TrainableTrajectory] = []
        for _ in range(self.num_rollouts):
            is_right = self.draw.random() < right
            wrong = self.draw.randrange(NUM_WRONG)
            part = wrong // 2 * PART if self.has_parts else 0.0
            probability = right if is_right else (1 - right) / NUM_WRONG
            tokens = [100 + question, 0] if is_right else [200 + question, wrong]
            sequence = TokenSequence(
                token_ids=[1, question, *tokens],
                logprobs=[None, None, max(math.log(max(probability, 1e-9)), -20.0), -0.01],
            )
            trajectories.append(TrainableTrajectory(reward=1.0 if is_right else part, sequences=[sequence]))
        return TrainableGroup(trajectories=trajectories, number=number)
