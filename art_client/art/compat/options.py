"""ART's options of a train call in terms of our `TrainConfig`.

For `backend.train(**options)`, for `model.train(_config=...)`, and for the server's ART wire. An option is honoured where
it means the same here.
"""

from collections.abc import Mapping
from typing import Any

from art.wire import TrainConfig

CISPO: dict[str, Any] = {"clip": "cispo", "epsilon": 1.0, "epsilon_high": 4.0}
PPO: dict[str, Any] = {"clip": "two_sided", "epsilon": 0.2, "epsilon_high": None}

ART_RATIO: dict[str, Any] = {"ratio_to": "sampled", "correction": "off"}
"""What `precalculate_logprobs=False`, ART's default, compares the policy with."""

ART_DEFAULTS: dict[str, Any] = {
    **CISPO,
    **ART_RATIO,
    "normalisation": "trajectory",
    "max_grad_norm": 0.1,
}
"""What ART's `backend.train` does unasked, where it differs from `TrainConfig()`."""

CAP = "truncated_importance_sampling"
"""It weighs pi_old / pi_sampled, so that ART skips it too without `precalculate_logprobs`."""

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
    ("precalculate_logprobs", False): ART_RATIO,
    ("precalculate_logprobs", True): {"ratio_to": "start", "correction": "off"},
    ("kl_penalty_source", "current_learner"): {},  # one optimizer step: the learner is the sampler
    ("kl_penalty_source", "sample"): {},
}


def apply_options(config: TrainConfig, options: Mapping[str, Any]) -> tuple[TrainConfig, list[str]]:
    """`config` with the options in force, and the names of those that are not.

    An option that is None counts as not given; so does one that we lack and that is off (False, 0).
    """
    meant: dict[str, Any] = {}
    given: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        if name in TrainConfig.model_fields:
            given[name] = value
        elif isinstance(value, str | bool) and (name, value) in _MEANING:
            meant |= _MEANING[name, value]
        elif value and name == "kl_penalty_coef":
            meant |= {"beta": value, "kl_in": "advantage", "kl_estimator": "k1"}
        elif value and not (name == CAP and options.get("precalculate_logprobs")):
            ignored.append(name)
    if options.get("precalculate_logprobs") and options.get(CAP):
        meant |= {"correction": "truncate", "correction_high": options[CAP]}
    if "beta" in meant and not given.get("beta"):
        given.pop("beta", None)  # ART's records hold both, one of them 0
    if meant or given:
        fields = config.model_dump(exclude_unset=True) | meant | given
        config = TrainConfig.model_validate(fields)
    return config, ignored
