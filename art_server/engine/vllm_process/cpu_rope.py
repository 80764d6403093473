"""Rotary embeddings on a CPU for queries that have a dimension for their heads.

vLLM's kernel (0.32) reads queries of tokens x heads x size as if they were tokens x width, and turns each head wrongly. LFM2 and
multi-head latent attention pass such queries: without this patch the engine samples from another policy than the trainer trains.
Remove this file when `tests/quick/engine/vllm_process/test_cpu_rope.py` passes without the patch.
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
        if query.dim() == 2:
            return turn(self, positions, query, key)
        turned, turned_key = turn(self, positions, query.flatten(1), None if key is None else key.flatten(1))
        if key is None or turned_key is None:
            return turned.view(query.shape), None
        return turned.view(query.shape), turned_key.view(key.shape)

    RotaryEmbedding.forward_cpu = forward_cpu
