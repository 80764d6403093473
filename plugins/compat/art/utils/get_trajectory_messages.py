"""`get_trajectory_messages`: older releases of ART's name for `Trajectory.messages`."""

from art.trajectories import Trajectory
from art.types import Messages


def get_trajectory_messages(trajectory: Trajectory) -> Messages:
    return trajectory.messages()
