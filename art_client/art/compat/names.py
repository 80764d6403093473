"""The names of this folder that `import art` has."""

from art.compat import guiding, metrics, refused
from art.compat.aliases import alias
from art.compat.batches import trajectory_group_batches
from art.compat.capturing import (
    auto_trajectory,
    capture_auto_trajectory,
    current_trajectory,
    no_capture,
    trajectory,
    trajectory_group,
)
from art.compat.yielding import capture_yielded_trajectory, yield_trajectory

__all__ = [
    "auto_trajectory",
    "capture_auto_trajectory",
    "capture_yielded_trajectory",
    "current_trajectory",
    "no_capture",
    "trajectory",
    "trajectory_group",
    "trajectory_group_batches",
    "yield_trajectory",
]

alias("art.compat.capturing", "art.auto_trajectory")
alias("art.compat.yielding", "art.yield_trajectory")
alias("art.compat.batches", "art.batches")
alias(guiding.__name__, "art.guided_completion")
alias(metrics.__name__, "art.metrics", "art.api_costs")
refused.install()
