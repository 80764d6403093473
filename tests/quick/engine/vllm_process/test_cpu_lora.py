"""Our LoRA on a CPU against vLLM's own methods, which gather the adapter for every token."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

WIDTH, RANK, SLICES, NUM_ADAPTERS = 24, 4, (12, 8, 8), 3


@pytest.fixture(scope="module")
def both() -> Any:
    """vLLM's `add_lora_linear`, and a function from adapters of tokens to a step of the wrapper with our methods."""
    with warnings.catch_warnings(action="ignore"):  # vLLM's and torch's own deprecations
        punica = importlib.import_module("vllm.lora.punica_wrapper.punica_cpu")
        mapping = importlib.import_module("vllm.lora.layers").LoRAMapping
        ours = importlib.import_module("art_server.engine.vllm_process.cpu_lora")
    theirs = punica.PunicaWrapperCPU.add_lora_linear
    ours.install()
    assert punica.PunicaWrapperCPU.add_lora_linear is ours.add_lora_linear
    wrapper = punica.PunicaWrapperCPU(64, 64, "cpu")

    def step(adapters: list[int]) -> Any:
        ids = [adapter + 1 for adapter in adapters]  # 0 means none
        wrapper.update_metadata(mapping(ids, ids, is_prefill=True), [1, 2, 3], NUM_ADAPTERS + 1, 100)
        return wrapper

    return theirs, step


def of_layer(seed: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The adapters' A and B of a layer with three slices, as q, k and v."""
    torch.manual_seed(seed)
    return (
        tuple(torch.randn(NUM_ADAPTERS, 1, RANK, WIDTH) for _ in SLICES),
        tuple(torch.randn(NUM_ADAPTERS, 1, width, RANK) for width in SLICES),
    )


adapters_of_tokens = st.lists(st.integers(0, NUM_ADAPTERS - 1), min_size=1, max_size=20)


@settings(deadline=None, max_examples=25)
@given(
    steps=st.lists(
        adapters_of_tokens | adapters_of_tokens.map(lambda adapters: adapters[:1] * 7), min_size=1, max_size=4
    )
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrix_products_equal_the_gather(
    both: tuple[Callable[..., None], Any], dtype: torch.dtype, steps: list[list[int]]
) -> None:
    theirs, step = both
    a, b = of_layer(len(steps))
    for adapters in steps:
        wrapper = step(adapters)
        x = torch.randn(len(adapters), WIDTH).to(dtype)
        for y in (
            torch.randn(len(adapters), sum(SLICES)).to(dtype),
            torch.zeros(1, len(adapters), sum(SLICES), dtype=dtype),
        ):
            expected = y.clone()
            theirs(wrapper, expected, x, a, b, 0.5, SLICES)
            wrapper.add_lora_linear(y, x, a, b, 0.5, SLICES)
            # vLLM rounds the product to the output's type before it adds it.
            relative, absolute = (1.3e-6, 1e-5) if dtype is torch.float32 else (0.05, 0.3)
            torch.testing.assert_close(y, expected, rtol=relative, atol=absolute)


def test_a_token_without_an_adapter_is_left_as_it_is(both: Any) -> None:
    """vLLM's own takes the last adapter for it."""
    _, step = both
    a, b = of_layer(0)
    for adapters in ([0, -1, 1], [-1, -1, -1], [-1]):
        y = torch.ones(len(adapters), sum(SLICES))
        step(adapters).add_lora_linear(y, torch.randn(len(adapters), WIDTH), a, b, 1.0, SLICES)
        assert [bool((row == 1).all()) for row in y] == [adapter < 0 for adapter in adapters]
