"""ART's settings for engine and trainer: dictionaries with attribute access that are also types of pydantic fields.

Common keys are declared here with their types. All other keys are kept and sent as well. The server reports keys that
have no effect.
"""

from typing import Any, Self, get_type_hints

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from art_compat.aliases import alias
from art_compat.refused import refused

__all__ = [
    "EngineArgs",
    "InitArgs",
    "InternalModelConfig",
    "OpenAIServerConfig",
    "PeftArgs",
    "ServerArgs",
    "TorchtuneArgs",
    "TrainConfig",
    "TrainSFTConfig",
    "TrainerArgs",
]


class Settings(dict[str, Any]):
    """A dictionary with attribute access. A missing key raises AttributeError as an attribute."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def copy(self) -> Self:
        return type(self)(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        fields = {
            name: core_schema.typed_dict_field(handler.generate_schema(kind), required=False)
            for name, kind in get_type_hints(cls).items()
        }
        schema = core_schema.typed_dict_schema(fields, extra_behavior="allow")
        return core_schema.no_info_after_validator_function(cls, schema)


class InitArgs(Settings):
    max_seq_length: int | None
    """Maximum number of tokens of prompt plus completion."""


class EngineArgs(Settings):
    """vLLM's arguments. A server applies the arguments that its --engine-arg accepts, if the engine has not started yet."""

    gpu_memory_utilization: float | None
    tensor_parallel_size: int | None
    max_logprobs: int | None
    max_num_seqs: int | None


class TrainerArgs(Settings):
    """Settings that override the configuration of a train call."""

    learning_rate: float | None
    beta: float | None
    """Weight of the KL penalty."""


class ServerArgs(Settings):
    """Arguments of ART's inference server. They have no effect: the flags of art-server configure our server."""


class TorchtuneArgs(Settings):
    """Arguments of a trainer of ART's older releases. They have no effect."""


class OpenAIServerConfig(Settings):
    log_file: str | None
    server_args: dict[str, Any] | None
    engine_args: EngineArgs | None


class PeftArgs(Settings):
    """The adapter's configuration."""

    r: int | None
    lora_alpha: float | None
    target_modules: list[str] | None


class InternalModelConfig(Settings):
    init_args: InitArgs | None
    engine_args: EngineArgs | None
    peft_args: PeftArgs | None
    trainer_args: TrainerArgs | None


class TrainConfig(Settings):
    """Options of `model.train(_config=...)` under ART's names. `backend.train` has the same options."""


class TrainSFTConfig(Settings):
    """Options of `model.train_sft(_config=...)` under ART's names. They have no effect."""


get_model_config = refused(
    "get_model_config",
    "fills in defaults of ART's engine and trainer: set _internal_config, or the flags of art-server",
)

_PARTS = ("engine", "get_model_config", "model", "openai_server", "torchtune", "train")
alias(__name__, *(f"{__name__}.{name}" for name in _PARTS))
