"""LoRA in few products against PEFT's own layers."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear
from torch import nn

from art_server.trainer.lora import fuse_lora


def layers(dtype: torch.dtype, bias: bool = True) -> tuple[nn.Module, nn.Module]:
    """PEFT's layer, and the same one fused."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(48, 32, bias=bias)).to(dtype)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["0"]))  # pyright: ignore[reportArgumentType]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    fused = copy.deepcopy(model)
    assert fuse_lora(fused) == (dtype != torch.float16)
    return model, fused


def outputs(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    x = x.clone().requires_grad_()
    y = model(x)
    (y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    assert x.grad is not None
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)
    return y.detach(), x.grad, gradients  # type: ignore[return-value]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_fused_products_are_pefts(dtype: torch.dtype, bar: float, bias: bool) -> None:
    model, fused = layers(dtype, bias)
    x = torch.randn(2, 700, 48, dtype=dtype)
    y, grad_x, gradients = outputs(fused, x)
    expected_y, expected_x, expected = outputs(model, x)
    assert y.dtype == dtype and distance(y, expected_y) < bar and distance(grad_x, expected_x) < bar
    for gradient, other in zip(gradients, expected, strict=True):
        assert distance(gradient, other) < bar


def test_other_layers_stay_pefts() -> None:
    model, _ = layers(torch.float16)
    assert fuse_lora(model) == 0
    _, fused = layers(torch.bfloat16)
    layer = next(module for module in fused.modules() if isinstance(module, Linear))
    with fused.disable_adapter():  # type: ignore[operator]
        x = torch.randn(3, 48, dtype=torch.bfloat16)
        assert torch.equal(layer(x), layer.get_base_layer()(x))


def test_no_tokens_are_no_error() -> None:
    """The trainer's output head computes single positions later, so its layer first gets none."""
    _, fused = layers(torch.float32)
    assert fused(torch.zeros(1, 0, 48)).shape == (1, 0, 32)
