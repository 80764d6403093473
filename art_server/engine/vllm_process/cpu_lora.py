"""LoRA on a CPU as matrix products, where vLLM gathers a copy of the adapter for every token.

`install` replaces methods of vLLM's CPU wrapper. The numbers are the same, with sums in the output's type. A token without
an adapter is left unchanged.
"""

import functools
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def by_adapter(indices: torch.Tensor) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Each adapter of a batch with its tokens; None means all tokens. Index -1 means no adapter."""
    adapters = indices.unique().tolist()
    for adapter in adapters:
        if adapter >= 0:
            yield adapter, (indices == adapter).nonzero().squeeze(1) if len(adapters) > 1 else None


def add_lora_linear(
    self: Any,  # the wrapper, with an attribute of ours
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
) -> None:
    """y[token] += scale * B @ A @ x[token], with B and A of the token's adapter, for each slice of y's columns."""
    # As vLLM, whose buffer for A's products is float32 (0.32, punica_cpu.py).
    x = x.view(-1, x.shape[-1]).float()
    slices = y.view(-1, y.shape[-1]).split(output_slices, 1)
    for adapter, tokens in self.tokens_by_adapter:
        inputs = x if tokens is None else x[tokens]
        for part, a, b in zip(slices, lora_a_stacked, lora_b_stacked, strict=True):
            shrunk = torch.nn.functional.linear(inputs, a[adapter, 0].float()).to(y.dtype)
            matrix = b[adapter, 0].to(y.dtype).T
            if tokens is None:
                part.addmm_(shrunk, matrix, alpha=scale)
            else:
                part.index_add_(0, tokens, shrunk @ matrix, alpha=scale)


def add_nothing(*_: Any, **options: Any) -> None:
    """Our adapters change neither the embedding nor the head."""


def install() -> None:
    """Replaces methods of vLLM's CPU wrapper.

    Raises:
        ImportError: vLLM's wrapper has changed.
    """
    for name in ("update_metadata", "add_lora_linear", "add_lora_embedding", "add_lora_logits"):
        if not hasattr(PunicaWrapperCPU, name):
            raise ImportError(f"vLLM's CPU wrapper no longer has {name}")
    update = PunicaWrapperCPU.update_metadata

    @functools.wraps(update)
    def update_metadata(self: Any, *args: Any, **options: Any) -> None:
        # vLLM calls this method once a step, if the adapters differ from the last step's.
        update(self, *args, **options)
        self.tokens_by_adapter = list(by_adapter(self.token_lora_indices))

    wrapper: Any = PunicaWrapperCPU  # Any: gets attributes of ours
    wrapper.tokens_by_adapter = []
    wrapper.update_metadata = update_metadata
    wrapper.add_lora_linear = add_lora_linear
    wrapper.add_lora_embedding = wrapper.add_lora_logits = add_nothing


def leave_experts_out() -> None:
    """Has experts computed by vLLM's CPU kernels: with LoRA vLLM chooses Triton kernels for them, which need a GPU.

    Our adapters do not change experts (`--lora-target-modules`).

    Raises:
        ImportError: vLLM's choice of kernels has changed.
    """
    # Imported here, because the import takes seconds.
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    choose = method.select_unquantized_moe_backend
    if "is_lora_enabled" not in {field.name for field in fields(method.FusedMoEConfig)}:
        raise ImportError("vLLM no longer chooses the kernels of experts by is_lora_enabled")
    method.select_unquantized_moe_backend = lambda moe_config: choose(
        moe_config=replace(moe_config, is_lora_enabled=False)
    )
