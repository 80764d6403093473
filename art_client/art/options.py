"""ART's options of a train call in terms of our `TrainConfig`.

For `backend.train(**options)`, for `model.train(_config=...)`, and for the server's ART wire. An option is honoured where
it means the same here; the others are told apart by whether they would change what is learned.
"""

from collections.abc import Mapping
from typing import Any

from art.wire import TrainConfig

CISPO: dict[str, Any] = {"clip": "cispo", "epsilon": 1.0, "epsilon_high": 4.0}
PPO: dict[str, Any] = {"clip": "two_sided", "epsilon": 0.2, "epsilon_high": None}

ART_DEFAULTS: dict[str, Any] = {**CISPO, "normalisation": "trajectory", "max_grad_norm": 0.1}
"""What ART's `backend.train` does unasked, where it differs from `TrainConfig()`."""

_MEANING: dict[tuple[str, str | bool], dict[str, Any]] = {
    ("loss_fn", "cispo"): CISPO,
    ("loss_fn", "ppo"): PPO,
    ("ppo", False): CISPO,
    ("ppo", True): PPO,
    ("scale_rewards", True): {"scaling": "group_std"},
    ("scale_rewards", False): {"scaling": "none"},
    ("normalize_advantages", True): {},
    ("normalize_advantages", False): {"scaling": "none"},
    ("importance_sampling_level", "token"): {"ratio": "token"},
    ("importance_sampling_level", "sequence"): {"ratio": "sequence"},
    ("importance_sampling_level", "geometric_average"): {"ratio": "geometric"},
    ("kl_penalty_source", "current_learner"): {},  # one optimizer step: the learner is the sampler
    ("kl_penalty_source", "sample"): {},
}

_NO_EFFECT = frozenset(
    {
        "final_training_step",
        "grad_accumulation_sequences",
        "logprob_calculation_chunk_size",
        "optimizer_save_interval",
        "packed_sequence_length",
        "precalculate_logprobs",
        "save_checkpoint",
        "scale_learning_rate_by_reward_std_dev",
    }
)
"""They steer memory and storage of ART's own trainer, or nothing there either."""


def translate(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Fields of `TrainConfig`; the options without effect here; those that would change the update and are not there.

    None, False, 0 and an option's absence are the same, except where False means something.
    """
    fields: dict[str, Any] = {}
    direct: dict[str, Any] = {}
    idle: list[str] = []
    missing: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        if name in TrainConfig.model_fields:
            direct[name] = value
        elif isinstance(value, str | bool) and (name, value) in _MEANING:
            fields |= _MEANING[name, value]
        elif name in _NO_EFFECT:
            idle.append(name)
        elif not value:
            continue
        elif name == "kl_penalty_coef":
            fields |= {"beta": value, "kl_in": "advantage", "kl_estimator": "k1"}
        elif name == "truncated_importance_sampling":
            fields |= {"correction": "truncate", "correction_high": value}
        else:
            missing.append(name)
    if not direct.get("beta") and "beta" in fields:
        direct.pop("beta", None)
    return fields | direct, idle, missing


def apply_options(
    config: TrainConfig, options: Mapping[str, Any]
) -> tuple[TrainConfig, list[str], list[str]]:
    """`config` with the options in force, and those that are not, as in `translate`."""
    fields, idle, missing = translate(options)
    if fields:
        config = TrainConfig.model_validate(config.model_dump(exclude_unset=True) | fields)
    return config, idle, missing
