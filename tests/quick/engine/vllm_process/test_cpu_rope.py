"""vLLM's rotary embeddings on a CPU turn each head, whatever the shape of queries and keys."""

import warnings

import pytest
import torch

from art_server.engine.vllm_process import cpu_rope

with warnings.catch_warnings(action="ignore"):  # vLLM's and torch's own deprecations
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

TOKENS, SIZE = 40, 32


@pytest.fixture(autouse=True)
def changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)
    cpu_rope.install()


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("has_heads", [True, False], ids=["heads", "flat"])
@pytest.mark.parametrize("num_key_heads", [2, None])
def test_each_head_is_turned_as_without_the_kernel(has_heads: bool, num_key_heads: int | None, is_neox: bool) -> None:
    torch.manual_seed(0)
    positions = torch.randperm(128)[:TOKENS]
    query = torch.randn(TOKENS, 4 * SIZE)
    key = None if num_key_heads is None else torch.randn(TOKENS, num_key_heads * SIZE)
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            SIZE,
            max_position=128,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            is_neox_style=is_neox,
            dtype=torch.float32,
        )
    turned, turned_key = rope.forward_native(positions, query.clone(), None if key is None else key.clone())

    def shaped(flat: torch.Tensor) -> torch.Tensor:
        return flat.clone().view(TOKENS, -1, SIZE) if has_heads else flat.clone()

    patched, patched_key = rope.forward_cpu(positions, shaped(query), None if key is None else shaped(key))
    assert patched.shape == shaped(query).shape
    torch.testing.assert_close(patched.view(TOKENS, -1), turned)
    if key is None:
        assert patched_key is None
    else:
        assert patched_key is not None and patched_key.shape == shaped(key).shape
        torch.testing.assert_close(patched_key.view(TOKENS, -1), turned_key)
