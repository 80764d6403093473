"""Rollouts in the environments of other projects, and in a program's own text environments.

tasks = reasoning_gym("leg_counting", size=64, seed=1)
group = await art.TrajectoryGroup(play(model, task) for _ in range(8))
"""

from art.environments.playing import TextEnvironment, play
from art.environments.reasoning import ReasoningTask, reasoning_gym

__all__ = ["ReasoningTask", "TextEnvironment", "play", "reasoning_gym"]
