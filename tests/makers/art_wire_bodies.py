"""Train requests as NVIDIA's plugin sends them."""

from typing import Any


def train_body(model: dict[str, Any], *episodes: list[dict[str, Any]]) -> dict[str, Any]:
    """One group; the reward of each episode is its number."""
    trajectories = [
        {
            "messages_and_choices": episode,
            "tools": None,
            "additional_histories": [],
            "reward": float(reward),
            "initial_policy_version": None,
            "final_policy_version": None,
            "metrics": {},
            "metadata": {},
            "logs": [],
        }
        for reward, episode in enumerate(episodes)
    ]
    group = {"trajectories": trajectories, "exceptions": [], "metadata": {}, "metrics": {}}
    config = {"learning_rate": 5e-05, "kl_penalty_coef": 0.0}
    return {
        "model": model,
        "trajectory_groups": [group | {"logs": []}],
        "config": config,
        "dev_config": {},
        "verbose": False,
    }
