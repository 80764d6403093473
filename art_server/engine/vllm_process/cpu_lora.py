"""LoRA on a CPU as matrix products, where vLLM gathers a copy of the adapter for every token.

`install` replaces the functions that vLLM's CPU wrapper calls. The numbers are the same, with sums in the output's
type. A token without an adapter (index -1) is left unchanged.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from vllm.lora.punica_wrapper import punica_cpu


def only_adapter(indices: torch.Tensor) -> int | None:
    """The adapter that all tokens have; None if they differ."""
    first = int(indices[0]) if len(indices) else -1
    return first if bool((indices == first).all()) else None


def by_adapter(indices: torch.Tensor) -> Iterator[tuple[int, torch.Tensor | slice]]:
    """Each adapter of a batch, with the indices of its tokens."""
    first = only_adapter(indices)
    if first is not None:
        if first >= 0:
            yield first, slice(None)
        return
    for adapter in indices.unique().tolist():
        if adapter >= 0:
            yield adapter, (indices == adapter).nonzero().squeeze(1)


def bgmv_shrink(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """output[token] = scaling * A[adapter of the token] @ inputs[token]"""
    for adapter, tokens in by_adapter(indices):
        matrix = weights[adapter].flatten(end_dim=-2).to(output.dtype)
        product = inputs[tokens].to(output.dtype) @ matrix.T
        output[tokens, : len(matrix)] = scaling * product


def bgmv_expand(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """output[token] (+)= B[adapter of the token] @ inputs[token]"""
    # Adapter and model may pad the output to different widths.
    width = min(weights.shape[-2], output.shape[1])
    bgmv_expand_slice(inputs, weights, output, indices, 0, width, add_inputs)


def bgmv_expand_slice(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """`bgmv_expand` into a slice of the output's columns."""
    columns = slice(slice_offset, slice_offset + slice_size)
    for adapter, tokens in by_adapter(indices):
        matrix = weights[adapter].flatten(end_dim=-2)[:slice_size].to(output.dtype)
        selected = inputs[tokens].to(output.dtype)
        if not add_inputs:
            output[tokens, columns] = selected @ matrix.T
        elif isinstance(tokens, slice):
            output[tokens, columns].addmm_(selected, matrix.T)  # in one pass
        else:
            output[tokens, columns] += selected @ matrix.T


def by_sequence(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with one adapter index for each sequence, as vLLM's wrapper calls it."""

    def sgmv(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        indices: torch.Tensor,
        batches: int,
        max_length: int,
        num_tokens: int,
        *options: Any,
    ) -> None:
        if only_adapter(indices) is None:
            indices = indices.repeat_interleave(lengths)
        function(inputs, weights, output, indices, *options)

    return sgmv


def install() -> None:
    """Replaces the LoRA functions of vLLM's CPU wrapper.

    Raises:
        ImportError: vLLM's wrapper has changed.
    """
    for function in (bgmv_shrink, bgmv_expand, bgmv_expand_slice):
        sgmv = by_sequence(function)
        for name, ours in ((function.__name__, function), ("s" + function.__name__[1:], sgmv)):
            if not hasattr(punica_cpu, name):
                raise ImportError(f"vLLM's CPU wrapper no longer uses {name}")
            setattr(punica_cpu, name, ours)
    add_logits = punica_cpu.PunicaWrapperCPU.add_lora_logits

    @functools.wraps(add_logits)
    def add_logits_of_a_batch(self: Any, y: torch.Tensor, x: torch.Tensor, *args: Any, **options: Any) -> None:
        # For prompt_logprobs vLLM computes the head on one request's whole prompt, for which it has no adapter indices.
        # Our adapters do not change the head.
        if len(self.sampler_indices) == x.view(-1, x.shape[-1]).shape[0]:
            add_logits(self, y, x, *args, **options)

    punica_cpu.PunicaWrapperCPU.add_lora_logits = add_logits_of_a_batch


def leave_experts_out() -> None:
    """Has experts computed by vLLM's CPU kernels: with LoRA vLLM chooses Triton kernels for them, which need a GPU.

    Our adapters do not change experts (`--lora-target-modules`).

    Raises:
        ImportError: vLLM's choice of kernels has changed.
    """
    # Imported here, because it takes seconds.
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    choose = method.select_unquantized_moe_backend
    if "is_lora_enabled" not in {each.name for each in fields(method.FusedMoEConfig)}:
        raise ImportError("vLLM no longer chooses the kernels of experts by is_lora_enabled")
    method.select_unquantized_moe_backend = lambda moe_config: choose(
        moe_config=replace(moe_config, is_lora_enabled=False)
    )
