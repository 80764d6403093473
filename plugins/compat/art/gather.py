"""ART's path of the gather calls, and of the parts of a gather call."""

from art.core.gather import gather_trajectories, gather_trajectory_groups
from art_compat.gathering import (
    GatherContext,
    get_gather_context,
    set_gather_context,
    wrap_group_awaitable,
    wrap_trajectories_awaitable,
)

__all__ = [
    "GatherContext",
    "gather_trajectories",
    "gather_trajectory_groups",
    "get_gather_context",
    "set_gather_context",
    "wrap_group_awaitable",
    "wrap_trajectories_awaitable",
]
