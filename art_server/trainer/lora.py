"""PEFT's LoRA layers computed in fewer passes.

A patch of peft 0.21 (peft/tuners/lora/layer.py, `Linear.forward`), only for speed. In PEFT base(x) + B(A(x)) * scale is
three products and two more passes over the output, and again in backward. Here the small product is added inside the
matrix product. With bfloat16 weights PEFT also computes the adapter in float32. Here its products are bfloat16, as in
vLLM, and only the gradients of its weights are float32. The patch applies to float32 and bfloat16 layers with one
adapter, without dropout or other variants; other layers keep PEFT's forward. Remove it when PEFT itself adds the small
product inside the matrix product.
"""

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear

# PEFT's name for an adapter that was given none.
ADAPTER = "default"


def fuse_lora(model: torch.nn.Module) -> int:
    """Gives the layers that qualify the fused forward and returns their number. Safe to repeat."""
    layers = [module for module in model.modules() if isinstance(module, Linear) and _qualifies(module)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return len(layers)


def _qualifies(layer: Linear) -> bool:
    base = layer.get_base_layer()
    return (
        type(base) is torch.nn.Linear
        and base.weight.dtype in (torch.float32, torch.bfloat16)
        and layer.lora_A[ADAPTER].weight.dtype == torch.float32
        and layer.active_adapters == [ADAPTER]
        and isinstance(layer.lora_dropout[ADAPTER], torch.nn.Identity)
        and not layer.lora_variant
        and layer.lora_B[ADAPTER].bias is None
    )


def _forward(layer: Linear, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    # Any: arguments of adapter variants, which `_qualifies` has excluded.
    base = layer.get_base_layer()
    if layer.disable_adapters:
        return base(x)
    if x.dtype != base.weight.dtype:
        return Linear.forward(layer, x)
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    return _LoRALinear.apply(x, base.weight, base.bias, down, up, layer.scaling[ADAPTER])  # pyright: ignore[reportReturnType]  # apply is untyped


class _LoRALinear(torch.autograd.Function):
    """y = x W' + bias + scale * (x A') B', for a frozen W, in W's dtype. A, B and their gradients are float32.

    Source: Hu et al. 2021, arXiv:2106.09685, eq. 3.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        down, up = down.to(weight.dtype), up.to(weight.dtype)
        y_TE = x_TD @ weight.T if bias is None else torch.addmm(bias, x_TD, weight.T)
        small_TR = x_TD @ down.T
        y_TE.addmm_(small_TR, up.T, alpha=scale)
        ctx.save_for_backward(x_TD, small_TR, weight, down, up)
        ctx.scale, ctx.shape = scale, x.shape
        return y_TE.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, small_TR, weight, down, up = ctx.saved_tensors
        grad_TE = gradients[0].reshape(-1, weight.shape[0])
        grad_small_TR = (grad_TE @ up).mul_(ctx.scale)
        grad_down = _float32_product(grad_small_TR.T, x_TD)
        # Transposed, because a product with 8 columns runs at a sixth of the speed of one with 8 rows.
        grad_up = _float32_product(small_TR.T, grad_TE).mul_(ctx.scale).T
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_TE @ weight).addmm_(grad_small_TR, down).view(ctx.shape)
        return grad_x, None, None, grad_down, grad_up, None


def _float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in float32: the product sums over thousands of tokens, which bfloat16 would round to eight bits."""
    if a.dtype != torch.float32 and a.device.type == "cuda":  # torch has `out_dtype` on CUDA only
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
