"""ART's `_internal_config`, as far as it has a meaning here: `init_args.max_seq_length` and `engine_args` go to the server
with the registration, `peft_args` are the adapter's configuration, and `trainer_args` are defaults of each train call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from art.types import LoRAConfig
from art_protocol.art_options import apply_options
from art_protocol.wire import TrainConfig

CLIENT_CONFIG_IGNORED = (
    "register: _openai_client_config is ignored: the flags of art-server, and the model's _internal_config, configure the "
    "engine"
)


@dataclass(frozen=True, slots=True)
class InternalSettings:
    """What a model's `_internal_config` means."""

    engine_args: dict[str, Any] = field(default_factory=dict[str, Any])
    trainer_args: dict[str, Any] = field(default_factory=dict[str, Any])
    lora: LoRAConfig | None = None
    without_effect: list[str] = field(default_factory=list[str])


def read(config: Mapping[str, Any] | None) -> InternalSettings:
    """The settings in `_internal_config`. Values that are None count as not given."""
    given = {key: _given(value) for key, value in (config or {}).items() if value is not None}
    init_args, peft_args = given.pop("init_args", {}), given.pop("peft_args", {})
    engine_args, trainer_args = given.pop("engine_args", {}), given.pop("trainer_args", {})
    without_effect = [*given, *(f"init_args.{key}" for key in init_args if key != "max_seq_length")]
    if "max_seq_length" in init_args:
        engine_args = {**engine_args, "max_seq_length": init_args["max_seq_length"]}
    _, ignored = apply_options(TrainConfig(), trainer_args)
    without_effect += [f"trainer_args.{key}" for key in ignored]
    lora = LoRAConfig.model_validate(peft_args) if peft_args else None
    return InternalSettings(engine_args, trainer_args, lora, without_effect)


def with_defaults(config: TrainConfig, settings: InternalSettings) -> TrainConfig:
    """A train call's configuration with the `trainer_args` that it does not set itself."""
    defaults, _ = apply_options(TrainConfig(), settings.trainer_args)
    # One option, such as `ppo`, sets several fields, so that fields are compared and not names.
    return defaults.model_copy(update={name: getattr(config, name) for name in config.model_fields_set})


def _given(options: Any) -> dict[str, Any]:
    """The options that are set. Programs also pass other objects than dictionaries; those have no effect."""
    if not isinstance(options, Mapping):
        return {}
    fields = cast("Mapping[str, Any]", options)
    return {name: value for name, value in fields.items() if value is not None}
