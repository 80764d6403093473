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
    """The settings in `_internal_config`. A value that is None counts as absent."""
    sections = {key: _to_options(value) for key, value in (config or {}).items() if value is not None}
    init_args, peft_args = sections.pop("init_args", {}), sections.pop("peft_args", {})
    engine_args, trainer_args = sections.pop("engine_args", {}), sections.pop("trainer_args", {})
    without_effect = [*sections, *(f"init_args.{key}" for key in init_args if key != "max_seq_length")]
    if "max_seq_length" in init_args:
        engine_args = {**engine_args, "max_seq_length": init_args["max_seq_length"]}
    _, ignored = apply_options(TrainConfig(), trainer_args)
    without_effect += [f"trainer_args.{key}" for key in ignored]
    lora = LoRAConfig.model_validate(peft_args) if peft_args else None
    return InternalSettings(engine_args, trainer_args, lora, without_effect)


def with_defaults(config: TrainConfig, settings: InternalSettings) -> TrainConfig:
    """A train call's configuration, with `trainer_args` for the fields that the call does not set."""
    defaults, _ = apply_options(TrainConfig(), settings.trainer_args)
    # One option, such as `ppo`, sets several fields. So fields are compared, not names of options.
    return defaults.model_copy(update={name: getattr(config, name) for name in config.model_fields_set})


def _to_options(section: Any) -> dict[str, Any]:
    """The options that are set in a section. Programs also pass objects that are no dictionaries, which have no effect."""
    if not isinstance(section, Mapping):
        return {}
    options = cast("Mapping[str, Any]", section)
    return {name: value for name, value in options.items() if value is not None}
