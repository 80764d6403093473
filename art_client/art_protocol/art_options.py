"""Translates ART's options of a train call into our `TrainConfig`.

Used by `backend.train(**options)`, by `model.train(_config=...)`, and by the server's ART wire. An option has an effect
if our trainer has an equivalent.
"""

from collections.abc import Mapping
from typing import Any

from art_protocol.wire import TrainConfig

CISPO: dict[str, Any] = {"clip": "cispo", "epsilon": 1.0, "epsilon_high": 4.0}
PPO: dict[str, Any] = {"clip": "two_sided", "epsilon": 0.2, "epsilon_high": None}

ART_RATIO: dict[str, Any] = {"ratio_to": "sampled", "correction": "off"}
"""The ratio under `precalculate_logprobs=False`, ART's default."""

ART_DEFAULTS: dict[str, Any] = {
    **CISPO,
    **ART_RATIO,
    "normalisation": "trajectory",
    "max_grad_norm": 0.1,
}
"""The defaults of ART's `backend.train` that differ from `TrainConfig()`."""

CAP = "truncated_importance_sampling"
"""ART's cap on pi_old / pi_sampled. Without `precalculate_logprobs` the cap has no effect, in ART as well."""

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
    # With kl_in="advantage", the KL is computed from the sampler's log-probabilities.
    ("kl_penalty_source", "sample"): {},
}


def apply_options(config: TrainConfig, options: Mapping[str, Any]) -> tuple[TrainConfig, list[str]]:
    """`config` with the options applied, and the names of options without effect.

    An option that is None counts as absent. An option that we do not have counts as absent if the option is off (False, 0).
    """
    translated: dict[str, Any] = {}
    own: dict[str, Any] = {}  # options that have the names of our fields
    ignored: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        if name in TrainConfig.model_fields:
            own[name] = value
        elif isinstance(value, str | bool) and (name, value) in _MEANING:
            translated |= _MEANING[name, value]
        elif value and name == "kl_penalty_coef":
            translated |= {"beta": value, "kl_in": "advantage", "kl_estimator": "k1"}
        elif value and not (name == CAP and options.get("precalculate_logprobs")):
            ignored.append(name)
    if options.get("precalculate_logprobs") and options.get(CAP):
        translated |= {"correction": "truncate", "correction_high": options[CAP]}
    if "beta" in translated and not own.get("beta"):
        own.pop("beta", None)  # ART's records contain `beta` and `kl_penalty_coef`, one of them with 0
    if translated or own:
        fields = config.model_dump(exclude_unset=True) | translated | own
        config = type(config)(**fields)
    return config, ignored
