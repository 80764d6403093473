"""Each accepted value of each field of a registration's adapter and of a train call trains a step.

The values come from the fields' types, so that a new field, choice or bound is covered: every choice, both booleans, and of
numbers the bounds (where there is none, LARGE).
"""

import math
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import pytest
from pydantic import BaseModel

from art_protocol.wire import LoRAConfig, TrainConfig
from art_server.shared.trainer_messages import TrainTask
from art_server.trainer.job import train
from art_server.trainer.policy import ADAPTER_FILE, Policy
from tests.makers.first_steps import write_first_checkpoint

LARGE, ABOVE = 10**6, 1e-6
"""For a number without an upper bound, and for the least number above an open bound."""

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NAMES = [*([layer] for layer in LAYERS), LAYERS, ["layers.1.self_attn.q_proj"]]
"""For target_modules, whose type has no choices."""

NEEDS: dict[tuple[str, Any], dict[str, Any]] = {
    ("schedule", "cosine"): {"schedule_steps": 10},
    ("overlong", "soft_penalty"): {"overlong_length": 16, "overlong_buffer": 8},
    ("correction_low", LARGE): {"correction_high": LARGE},
    ("baseline", "similar_prompts"): {"scaling": "batch_std"},
    ("objective", "likelihood"): {"baseline": "none", "scaling": "none"},
    ("held_out", LARGE): {
        "objective": "likelihood",
        "baseline": "none",
        "scaling": "none",
    },  # the server sets these groups apart
}
"""What a value requires of other fields."""


def values_of(kind: Any, bounds: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Any: an annotation, and values of its type."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        own_bounds = [bound for part in parts[1:] for bound in getattr(part, "metadata", [part])]
        yield from values_of(parts[0], (*bounds, *own_bounds))
    elif origin is Literal:
        yield from parts
    elif origin in (Union, UnionType):
        for part in parts:
            yield from values_of(part, bounds)
    elif kind is NoneType:
        yield None
    elif kind is bool:
        yield from (False, True)
    elif origin is list:
        yield from NAMES if parts == (str,) else ([value] for value in values_of(parts[0]))
    else:
        assert kind in (int, float), f"{kind}: say which values of this type the test takes"
        above = ABOVE if kind is float else 1
        least = next(
            bound.ge if isinstance(bound, annotated_types.Ge) else kind(bound.gt) + above  # pyright: ignore[reportArgumentType]
            for bound in bounds
            if isinstance(bound, annotated_types.Ge | annotated_types.Gt)
        )
        yield kind(least)  # pyright: ignore[reportArgumentType]
        yield kind(
            next((bound.le for bound in bounds if isinstance(bound, annotated_types.Le)), LARGE)  # pyright: ignore[reportArgumentType]
        )


def cases(model: type[BaseModel]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}-{value}"[:60])
        for name, field in model.model_fields.items()
        for value in values_of(field.annotation, tuple(field.metadata))
    ]


@pytest.fixture(scope="module")
def start(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 0 of an adapter of rank 2."""
    folder = tmp_path_factory.mktemp("accepted") / "0"
    write_first_checkpoint(policy.base_model, LoRAConfig(rank=2), 0, folder)
    return folder


def take_step(policy: Policy, lora: LoRAConfig, config: TrainConfig, make_batch: Any, start: Path, out: Path) -> None:
    policy.tree_gap = 0.0  # as if an earlier step had compared trees with rows
    task = TrainTask(
        lora=lora,
        in_dir=str(start),
        out_dir=str(out),
        config=config,
        batch=make_batch(1, num_groups=2, group_size=2),
        start_step=3,
    )
    done = train(policy, task, 4096, lambda _: None)
    assert (out / ADAPTER_FILE).exists()
    assert all(map(math.isfinite, done.metrics.values()))


@pytest.mark.parametrize(("name", "value"), cases(LoRAConfig))
def test_each_accepted_adapter_trains(name: str, value: Any, policy: Policy, make_batch: Any, tmp_path: Path) -> None:
    lora = LoRAConfig.model_validate({name: value})
    write_first_checkpoint(policy.base_model, lora, 0, tmp_path / "0")
    take_step(policy, lora, TrainConfig(learning_rate=1e-3), make_batch, tmp_path / "0", tmp_path / "1")
    trained = {parameter.split(".lora_")[0].rpartition(".")[2] for parameter in policy.parameters}
    if name == "target_modules":
        assert trained == set(LAYERS if value is None else [target.rpartition(".")[2] for target in value])


@pytest.mark.parametrize(("name", "value"), cases(TrainConfig))
def test_each_accepted_train_configuration_trains(
    name: str, value: Any, policy: Policy, make_batch: Any, start: Path, tmp_path: Path
) -> None:
    config = TrainConfig.model_validate(
        {name: value, **NEEDS.get((name, value) if not isinstance(value, list) else ("", ""), {})}
    )
    take_step(policy, LoRAConfig(rank=2), config, make_batch, start, tmp_path / "1")


@pytest.mark.parametrize(
    "names",
    [
        *(["lm_head"], ["lm_head", "q_proj"], ["embed_tokens"], ["q_proj", "embed_tokens"]),
        *(["mlp"], ["nothing"], ["q_proj", "nothing"], ["norm"], ["model"], ["roj"]),
    ],
)
def test_what_takes_no_adapter_is_refused_by_name(names: list[str], policy: Policy, tmp_path: Path) -> None:
    refused = ", ".join(sorted(set(names) - {"q_proj"}))
    with pytest.raises(ValueError, match=f"target_modules .*{refused},"):
        write_first_checkpoint(policy.base_model, LoRAConfig(target_modules=names), 0, tmp_path)


def test_no_layer_is_refused(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="target_modules"):
        write_first_checkpoint(policy.base_model, LoRAConfig(target_modules=[]), 0, tmp_path)
