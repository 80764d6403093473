"""Our LoRA on a CPU against vLLM's own functions, which gather the adapter for every token."""

import importlib
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

WIDTH, RANK, OUT = 24, 4, 20


@pytest.fixture(scope="module")
def both() -> Any:
    """vLLM's module, unpatched, and ours."""
    with warnings.catch_warnings(action="ignore"):  # vLLM's and torch's own deprecations
        theirs = importlib.import_module("vllm.lora.ops.torch_ops")
        ours = importlib.import_module("art_server.engine.vllm_process.cpu_lora")
        wrapper = importlib.import_module("vllm.lora.punica_wrapper.punica_cpu")
        ours.install()
    assert wrapper.bgmv_shrink is ours.bgmv_shrink, "the wrapper calls ours"
    return theirs, wrapper


indices = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@settings(deadline=None, max_examples=60)
@given(adapters=indices, lengths=st.lists(st.integers(1, 5), min_size=9, max_size=9), add=st.booleans())
def test_matrix_products_equal_the_gather(both: Any, adapters: list[int], lengths: list[int], add: bool) -> None:
    theirs, ours = both
    torch.manual_seed(len(adapters))
    of_sequences = torch.tensor(adapters)
    of_lengths = torch.tensor(lengths[: len(adapters)])
    num = int(of_lengths.sum())
    x = torch.randn(num, WIDTH)
    a, b = torch.randn(3, 1, RANK, WIDTH), torch.randn(3, 1, OUT, RANK)
    meta = (torch.zeros(len(adapters)), of_lengths, of_sequences, len(adapters), 5, num)
    of_tokens = of_sequences.repeat_interleave(of_lengths)

    def run(module: Any) -> list[torch.Tensor]:
        shrunk, shrunk_by_token = torch.zeros(2, num, RANK)
        module.sgmv_shrink(x, a, shrunk, *meta, 0.5)
        module.bgmv_shrink(x, a, shrunk_by_token, of_tokens, 0.5)
        outs = [torch.ones(num, OUT + 3), torch.ones(num, OUT + 3), torch.ones(num, OUT)]
        module.sgmv_expand_slice(shrunk, b, outs[0], *meta, 2, OUT, add)
        module.bgmv_expand(shrunk, b, outs[1], of_tokens, add)
        module.sgmv_expand(shrunk, b, outs[2], *meta, add)
        return [shrunk, shrunk_by_token, *outs]

    for mine, other in zip(run(ours), run(theirs), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_token_without_an_adapter_is_left_as_it_is(both: Any) -> None:
    """vLLM's own takes the last adapter for it."""
    _, ours = both
    x, b = torch.randn(3, RANK), torch.randn(2, OUT, RANK)
    out = torch.ones(3, OUT)
    ours.bgmv_expand(x, b, out, torch.tensor([0, -1, 1]), True)
    assert (out[1] == 1).all() and not (out[0] == 1).any()
    ours.bgmv_expand(x, b, out, torch.tensor([-1, -1, -1]), True)
    assert (out[1] == 1).all()
