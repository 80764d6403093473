"""Three small architectures, and every kind of loss."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

from art_protocol.wire import PRESETS, TrainConfig
from art_server.trainer.policy import Policy
from tests.makers.forests import save_random_adapter

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
    "sequence mask": {"correction": "sequence_mask", "correction_low": 0.99, "correction_high": 1.1},
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
    **{name: TrainConfig(**fields, max_grad_norm=1e9) for name, fields in OTHERS.items()},
}


def start(name: str, folder: Path) -> tuple[Policy, Path]:
    """A random model of the architecture and a checkpoint of it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(ARCHITECTURES[name]).save_pretrained(folder / "base")
    policy = Policy(str(folder / "base"), torch.float32)
    return policy, save_random_adapter(policy, folder / "adapter")
