"""The types of rollouts and train calls.

For a type checker, messages, choices and tools are those of the `openai` package. At run time messages and tools are
plain dictionaries, and the first access to `Choice` imports `openai`, so `import art` does not.
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


SHOWN_METRICS = ("train/reward", "loss/train")


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a train call."""

    step: int
    """The new step. Inference serves it, unless a note in the report explains why it cannot."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    report: JobReport = field(default_factory=JobReport)
    """What was trained, what was not, and why not."""

    def __repr__(self) -> str:
        shown = {name: self.metrics[name] for name in SHOWN_METRICS if name in self.metrics}
        return f"TrainResult(step={self.step}, metrics={shown} and {len(self.metrics) - len(shown)} more)"


class TrainSFTConfig(BaseModel):
    """ART's settings for supervised training, for programs that import the name. An art-server has no such training."""

    learning_rate: float | list[float] = 5e-5
    batch_size: int | Literal["auto"] = "auto"
    assistant_turns: Literal["all", "last"] = "all"


def __getattr__(name: str) -> Any:
    if name == "Choice":
        # Imported here, because importing openai takes most of a second.
        from openai.types.chat.chat_completion import Choice

        return Choice
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
