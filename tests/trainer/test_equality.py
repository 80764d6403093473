"""A tree is its sequences: the same loss and the same gradient, for every member of the family and three architectures."""

from pathlib import Path

import pytest
import torch
from forests import assert_tree_equals_rows, save_random_adapter
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from art_protocol.wire import PRESETS, TrainConfig
from art_server.trainer.policy import Policy

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SMALL, num_hidden_layers=2, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL, num_hidden_layers=2),
    "gemma3": Gemma3TextConfig(
        **SMALL,
        num_hidden_layers=3,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=8,
    ),
}

OTHERS = {
    "geometric": {"ratio": "geometric", "normalisation": "trajectory", "ratio_to": "sampled"},
    "truncate": {"clip": "none", "correction": "truncate", "correction_high": 1.1},
    "mask": {"correction": "mask", "correction_low": 0.9, "correction_high": 1.1},
    "sequence mask": {
        "correction": "sequence_mask",
        "correction_low": 0.99,
        "correction_high": 1.1,
    },
    "k1": {"beta": 0.3, "kl_estimator": "k1"},
    "k2": {"beta": 0.3, "kl_estimator": "k2"},
    "k3": {"beta": 0.3},
    "entropy": {"entropy_bonus": 0.1},
    "mask truncated": {"overlong": "mask", "preset": "gspo"},
}
"""What no preset has."""

CONFIGS = {
    **{name: TrainConfig(preset=name, max_grad_norm=1e9) for name in PRESETS},  # pyright: ignore[reportArgumentType]
    # Against the sampler, so that the clip bites on a first pass.
    **{
        f"{name} to sampled": TrainConfig(preset=name, ratio_to="sampled", max_grad_norm=1e9)  # pyright: ignore[reportArgumentType]
        for name in PRESETS
    },
    **{name: TrainConfig(**given, max_grad_norm=1e9) for name, given in OTHERS.items()},
}


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def started(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Policy, Path]:
    """A random model of the architecture and a checkpoint of it."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(ARCHITECTURES[request.param]).save_pretrained(folder / "base")
    policy = Policy(str(folder / "base"), torch.float32)
    return policy, save_random_adapter(policy, folder / "adapter")


EXAMPLES = {
    "deadline": None,
    # Shrinking would take minutes, and a seed shrinks to nothing telling.
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}

FORESTS = {
    "seed": st.integers(0, 100_000),
    "budget": st.integers(3, 600),
    "noise": st.sampled_from([1e-4, 0.05, 0.5]),
    "is_plain": st.booleans(),
}


@settings(max_examples=15, **EXAMPLES)
@given(name=st.sampled_from(sorted(CONFIGS)), **FORESTS)
def test_tree_equals_rows(
    started: tuple[Policy, Path],
    tmp_path: Path,
    name: str,
    seed: int,
    budget: int,
    noise: float,
    is_plain: bool,
) -> None:
    assert_tree_equals_rows(started, tmp_path, CONFIGS[name], seed, budget, noise, is_plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("started", "name"),
    # The loss does not depend on the model: one architecture has all of them, the others the three kinds of ratios.
    [
        (architecture, name)
        for architecture in ARCHITECTURES
        for name in sorted(CONFIGS)
        if architecture == "llama" or name in ("grpo", "gspo", "geometric")
    ],
    indirect=["started"],
)
@settings(max_examples=4, **EXAMPLES)
@given(**FORESTS)
@example(  # with GSPO, queries and keys without a gradient
    seed=206, budget=113, noise=0.05, is_plain=True
)
@example(  # every trajectory with signal is cut short
    seed=4088, budget=128, noise=0.5, is_plain=True
)
def test_tree_equals_rows_for_each_loss(
    started: tuple[Policy, Path],
    tmp_path: Path,
    name: str,
    seed: int,
    budget: int,
    noise: float,
    is_plain: bool,
) -> None:
    assert_tree_equals_rows(started, tmp_path, CONFIGS[name], seed, budget, noise, is_plain)
