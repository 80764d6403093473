"""Misspelt fields and the names of other libraries are refused with the name that was meant."""

from typing import Any

import pytest

import art
from art.unknown_fields import OTHER_NAMES
from art_protocol.wire import TrainConfig


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("learning_rte", "'learning_rate'"),
        ("kl_coef", "`beta`"),
        ("kl_loss_coef", "`beta`"),
        ("clip_ratio", "`epsilon`"),
        ("clip_ratio_high", "`epsilon_high`"),
        ("loss_type", "`preset`"),
        ("num_generations", "TrajectoryGroup"),
        ("max_completion_length", "`max_tokens`"),
        ("per_device_train_batch_size", "memory"),
        ("train_batch_size", "model.train"),
        ("num_train_epochs", "loop"),
    ],
)
def test_a_name_of_another_library_is_translated(name: str, meant: str) -> None:
    unknown: dict[str, Any] = {name: 1}
    with pytest.raises(ValueError, match=f"no field '{name}'.*{meant}"):
        art.TrainConfig(**unknown)


def test_all_unknown_fields_are_named_at_once() -> None:
    unknown: dict[str, Any] = {"kl_coef": 0.1, "num_generations": 8, "nonsense": 1}
    with pytest.raises(ValueError, match=r"(?s)kl_coef.*num_generations.*nonsense"):
        art.TrainConfig(**unknown)


def test_the_table_translates_what_is_no_field_of_ours_into_one() -> None:
    assert not OTHER_NAMES.keys() & TrainConfig.model_fields.keys()
    for ours in OTHER_NAMES.values():
        if ours.startswith("`") and "(" not in ours:
            assert ours[1:].partition("`")[0].partition("=")[0] in TrainConfig.model_fields, ours


def test_every_other_record_names_the_field_too() -> None:
    for kind, name, meant in (
        (art.LoRAConfig, "rnak", "rank"),
        (art.TrainSFTConfig, "epoch", "epochs"),
        (art.TrajectoryGroup, "metadat", "metadata"),
        (art.History, "tool", "tools"),
    ):
        unknown: dict[str, Any] = {name: 1}
        with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
            kind(**unknown)


@pytest.mark.anyio
async def test_train_points_to_its_config(model: art.TrainableModel, groups: list[art.TrajectoryGroup]) -> None:
    with pytest.raises(TypeError, match=r"config=art.TrainConfig\(learning_rate="):
        await model.train(groups, learning_rate=1e-4)  # type: ignore[arg-type]
