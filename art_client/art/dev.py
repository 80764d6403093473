"""ART's settings for its engine and trainer: dictionaries whose keys are attributes too, and types of pydantic fields.

What an art-server takes of them stands here with its type; every other key is kept and sent, and the server tells that
it has no effect.
"""

from typing import Any, Self, get_type_hints

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

__all__ = [
    "EngineArgs",
    "InitArgs",
    "InternalModelConfig",
    "OpenAIServerConfig",
    "TrainConfig",
    "TrainSFTConfig",
    "TrainerArgs",
]


class Settings(dict[str, Any]):
    """A dictionary with attributes. A key that was not given is no attribute either."""

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
        given = core_schema.typed_dict_schema(fields, extra_behavior="allow")
        return core_schema.no_info_after_validator_function(cls, given)


class InitArgs(Settings):
    max_seq_length: int | None
    """Tokens of prompt plus completion."""


class EngineArgs(Settings):
    """vLLM's arguments; a server takes those of its --engine-arg, as long as its engine has not started."""

    gpu_memory_utilization: float | None
    tensor_parallel_size: int | None
    max_logprobs: int | None
    max_num_seqs: int | None


class TrainerArgs(Settings):
    """They win over the configuration of a train call."""

    learning_rate: float | None
    beta: float | None
    """Weight of the KL penalty."""


class OpenAIServerConfig(Settings):
    log_file: str | None
    server_args: dict[str, Any] | None
    engine_args: EngineArgs | None


class InternalModelConfig(Settings):
    init_args: InitArgs | None
    engine_args: EngineArgs | None
    trainer_args: TrainerArgs | None


class TrainConfig(Settings):
    """Options of `model.train(_config=...)`, by ART's names; those of `backend.train` are the same."""


class TrainSFTConfig(Settings):
    """Accepted for its name."""
