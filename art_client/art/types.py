"""The names for what passes through a rollout and a train call.

Messages, choices and tools are those of the `openai` package for a type checker. At run time they are plain
containers, and `Choice` imports `openai` when it is first asked for, so `import art` does not.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import BaseModel

from art.wire import JobReport, LoRAConfig, TrainConfig

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam as Message
    from openai.types.chat import ChatCompletionToolParam as Tool
    from openai.types.chat.chat_completion import Choice

    MessageOrChoice: TypeAlias = Message | Choice
else:
    Message = dict[str, Any]
    Tool = dict[str, Any]
    MessageOrChoice = Any

Messages: TypeAlias = list[Message]
MessagesAndChoices: TypeAlias = list[MessageOrChoice]
Tools: TypeAlias = list[Tool]

__all__ = [
    "Choice",
    "LoRAConfig",
    "Message",
    "MessageOrChoice",
    "Messages",
    "MessagesAndChoices",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
]


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a train call did."""

    step: int
    """The step that it made; inference serves it from now on."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    report: JobReport = field(default_factory=JobReport)
    """What was trained, and what was not and why."""


class TrainSFTConfig(BaseModel):
    """ART's settings of supervised training, for programs that name the class; an art-server has no such call."""

    learning_rate: float | list[float] = 5e-5
    batch_size: int | Literal["auto"] = "auto"
    assistant_turns: Literal["all", "last"] = "all"


def __getattr__(name: str) -> Any:
    if name == "Choice":
        # Here, because importing openai takes most of a second.
        from openai.types.chat.chat_completion import Choice

        return Choice
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
