"""Rotary factors are vLLM's, fixed for a context."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from art_server.trainer.base import find_class
from art_server.trainer.rope import fix_rope
from tests.makers.toy_models import ORIGINAL, ROPES, SHAPE

HEAD = SHAPE["head_dim"]
USUAL = 1 / 10000.0 ** (torch.arange(0, HEAD, 2) / HEAD)


def model_with(rope: dict[str, Any], family: str = "phi3", **settings: Any) -> PreTrainedModel:
    fields = SHAPE | {"original_max_position_embeddings": ORIGINAL} | settings
    config = AutoConfig.for_model(family, **fields, rope_parameters={"rope_theta": 10000.0, **rope})
    return find_class(config)(config)


def embedding(model: PreTrainedModel, positions: list[int]) -> torch.Tensor:
    """Cosines and sines of each position."""
    rotary: Any = model.get_decoder().rotary_emb
    return torch.cat(rotary(torch.zeros(1), torch.tensor([positions])), -1)[0]


def expected(inverse: torch.Tensor, positions: list[int], scale: float = 1.0) -> torch.Tensor:
    angles = torch.tensor(positions)[:, None] * inverse.repeat(2)
    return torch.cat([angles.cos(), angles.sin()], -1) * scale


@pytest.mark.parametrize(
    ("context", "kind"), [(None, "long"), (ORIGINAL + 1, "long"), (512, "long"), (ORIGINAL, "short"), (8, "short")]
)
def test_the_context_decides_which_factors_of_longrope_hold_for_every_position(context: int | None, kind: str) -> None:
    rope = ROPES["phi3 longrope"]
    model = model_with(rope)
    fix_rope(model, context)
    inverse = USUAL / torch.tensor(rope[f"{kind}_factor"])
    scale = (1 + torch.log(torch.tensor(1024 / ORIGINAL)) / torch.log(torch.tensor(ORIGINAL))) ** 0.5
    for positions in ([0, 3, 9], [0, 3, 500], [1000]):
        torch.testing.assert_close(
            embedding(model, positions), expected(inverse, positions, float(scale)), atol=1e-4, rtol=0
        )


def test_another_context_replaces_the_factors() -> None:
    model = model_with(ROPES["phi3 longrope"])
    long = embedding(model, [0, 3, 500])
    fix_rope(model, 512)
    torch.testing.assert_close(embedding(model, [0, 3, 500]), long, atol=0, rtol=0)
    fix_rope(model, ORIGINAL)
    short = embedding(model, [0, 3, 9])
    assert (embedding(model, [0, 3, 500])[:2] == short[:2]).all() and (short[1] != long[1]).any()
    fix_rope(model, 512)
    torch.testing.assert_close(embedding(model, [0, 3, 500]), long, atol=0, rtol=0)


def test_a_scale_of_its_own_for_long_and_short_factors_is_the_engines() -> None:
    model = model_with(ROPES["phi3 longrope"] | {"short_mscale": 1.5, "long_mscale": 2.5})
    for context, scale in ((ORIGINAL, 1.5), (512, 2.5)):
        fix_rope(model, context)
        assert float(embedding(model, [0])[0, 0]) == scale


@pytest.mark.parametrize(
    ("trained", "base"), [(None, 10000.0), (256, 10000.0 * (4 * 1024 / 256 - 3) ** (HEAD / (HEAD - 2)))]
)
def test_dynamic_ntk_stretches_by_the_trained_positions_and_never_by_the_call(trained: int | None, base: float) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0}
    if trained is not None:
        rope["max_trained_positions"] = trained
    model = model_with(rope, "llama")
    fix_rope(model, 512)
    inverse = 1 / base ** (torch.arange(0, HEAD, 2) / HEAD)
    for positions in ([0, 3, 9], [0, 3, 5000]):
        torch.testing.assert_close(embedding(model, positions)[:2], expected(inverse, positions)[:2], atol=1e-5, rtol=0)


def test_an_alpha_leaves_out_the_factor_beside_it() -> None:
    """As Hunyuan is published."""
    rope = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}
    model = model_with(rope, "hunyuan_v1_dense")
    fix_rope(model, 512)
    base = 10000.0 * 1000.0 ** (HEAD / (HEAD - 2))
    inverse = 1 / base ** (torch.arange(0, HEAD, 2) / HEAD)
    torch.testing.assert_close(embedding(model, [0, 3, 500])[:2], expected(inverse, [0, 3, 500])[:2], atol=1e-5, rtol=0)


def test_each_type_of_layer_has_its_own_factors() -> None:
    layers = {"full_attention": ROPES["phi3 longrope"], "sliding_attention": {"rope_type": "default"}}
    config = AutoConfig.for_model(
        "gemma3_text",
        **SHAPE,
        sliding_window=16,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters={name: {"rope_theta": 10000.0, **rope} for name, rope in layers.items()},
    )
    model = find_class(config)(config)
    rotary: Any = model.model.rotary_emb
    fix_rope(model, 512)

    def cosines(layer: str, positions: list[int]) -> torch.Tensor:
        return rotary(torch.zeros(1), torch.tensor([positions]), layer)[0][0]

    for layer in layers:
        alone, beside = cosines(layer, [0, 3]), cosines(layer, [0, 3, 900])
        torch.testing.assert_close(beside[:2], alone, atol=0, rtol=0)
    long = USUAL / torch.tensor(ROPES["phi3 longrope"]["long_factor"])
    want = (3 * long.repeat(2)).cos() * rotary.full_attention_attention_scaling
    torch.testing.assert_close(cosines("full_attention", [3])[0], want, atol=1e-5, rtol=0)
    torch.testing.assert_close(cosines("sliding_attention", [3])[0], (3 * USUAL.repeat(2)).cos(), atol=1e-5, rtol=0)
