"""Rotary embeddings on a CPU for queries that have a dimension for their heads.

vLLM's kernel (0.32) reads queries of tokens x heads x size as if they were tokens x width, and turns each head wrongly. LFM2 and
multi-head latent attention call it so: without this patch the engine samples from another policy than the trainer trains.
Remove it when `tests/in_vllm/test_cpu_rope.py` passes without it.
"""

from typing import Any

import torch


def install() -> None:
    """Changes vLLM's rotary embeddings of this process."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    turn = RotaryEmbedding.forward_cpu

    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        turned, turned_key = turn(
            self, positions, _flat(query), None if key is None else _flat(key)
        )
        if key is None or turned_key is None:
            return turned.view(query.shape), None
        return turned.view(query.shape), turned_key.view(key.shape)

    RotaryEmbedding.forward_cpu = forward_cpu


def _flat(heads: torch.Tensor) -> torch.Tensor:
    """Tokens x width."""
    return heads.reshape(heads.shape[0], -1)
