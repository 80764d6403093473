"""Misspelt fields and the names of other libraries are refused with the name that was meant."""

from typing import Any

import pytest

import art
from art.unknown_fields import LORA_NAMES, OTHER_NAMES, SFT_NAMES
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


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (art.TrainSFTConfig, "val_set_size", "`art.evaluate"),
        (art.TrainSFTConfig, "micro_batch_size", "`batch_size`"),
        (art.TrainSFTConfig, "warmup_steps", "create_lr_schedule"),
        (art.TrainSFTConfig, "num_epochs", "`epochs`"),
        (art.TrainSFTConfig, "report_to", "trackers"),
        (art.TrainSFTConfig, "train_on_inputs", "`assistant_turns`"),
        (art.TrainConfig, "early_stopping_patience", "loop"),
        (art.TrainConfig, "micro_batch_size", "memory"),
        (art.LoRAConfig, "lora_r", "`rank`"),
        (art.LoRAConfig, "lora_target", "`target_modules`"),
    ],
)
def test_names_of_axolotl_and_trl_have_the_right_remedy(kind: type[Any], name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} has no field '{name}': here it is .*{meant}"):
        kind(**{name: 1})


def test_no_field_of_ours_is_another_name() -> None:
    assert not SFT_NAMES.keys() & art.TrainSFTConfig.model_fields.keys()
    assert not LORA_NAMES.keys() & art.LoRAConfig.model_fields.keys()


def test_the_help_of_a_configuration_names_its_fields() -> None:
    for kind in (art.TrainSFTConfig, art.LoRAConfig):
        assert all(f"`{name}`" in str(kind.__doc__) for name in kind.model_fields)
    assert "docs/train-config.md" in str(art.TrainConfig.__doc__)


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
