"""The types of rollouts and train calls.

For a type checker, messages, choices and tools are types of the `openai` package. At run time messages and tools are
plain dictionaries, and the first access to `Choice` imports `openai`, so `import art` does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import ConfigDict, Field

from art.field_errors import Configuration
from art.unknown_fields import ART_TRAINING_FIELDS, LORA_NAMES, OTHER_NAMES, PEFT_FIELDS, SFT_NAMES
from art_protocol import wire
from art_protocol.display import Displayed
from art_protocol.wire import JobReport

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
    "Tool",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
]


class TrainConfig(Configuration, wire.TrainConfig):
    """The configuration of one train call; docs/train-config.md has the meaning and the range of each field. Most used:
    `learning_rate` (5e-6, or "auto"), `warmup_steps`, `schedule`, `preset` (the loss by name), `beta` (KL penalty), `batch_size` (groups of
    an optimizer step), `passes`. Defaults: GRPO with group mean and standard deviation, the loss averaged over the batch's
    tokens, one AdamW step without weight decay (Shao et al. 2024, arXiv:2402.03300).

    Raises:
        ValueError: a value is out of range, or a field is unknown. The message names the field, and its range or the field that
            was meant.
    """

    _other_names: ClassVar[Mapping[str, str]] = OTHER_NAMES
    _left_out: ClassVar[frozenset[str] | None] = ART_TRAINING_FIELDS


class LoRAConfig(Configuration, wire.LoRAConfig):
    """Configuration of the trained adapter, fixed when a model is first registered: `rank` (8), `alpha` (16) and
    `target_modules` (None: all linear layers of the language model except the output head). `r` and `lora_alpha` are
    PEFT's names for the first two."""

    _renamed: ClassVar[Mapping[str, str]] = {"r": "rank", "lora_alpha": "alpha"}
    _other_names: ClassVar[Mapping[str, str]] = LORA_NAMES
    _left_out: ClassVar[frozenset[str] | None] = PEFT_FIELDS


def to_train_config(config: object) -> wire.TrainConfig:
    """The configuration that a program passes to a train call. A dictionary of fields is taken, too; None: the defaults.

    Raises:
        TypeError: the configuration is something else.
        ValueError: a field is unknown or out of range.
    """
    if isinstance(config, wire.TrainConfig):
        return config
    if config is None:
        return TrainConfig()
    if isinstance(config, Mapping):
        return TrainConfig(**cast("Mapping[str, Any]", config))
    call = ": `model.train_sft` takes it" if isinstance(config, TrainSFTConfig) else ""
    raise TypeError(f"config is a {type(config).__name__}, not art.TrainConfig(learning_rate=...){call}")


def to_sft_config(config: object) -> "TrainSFTConfig":
    """As `to_train_config`, for `model.train_sft`."""
    if isinstance(config, TrainSFTConfig):
        return config
    if config is None:
        return TrainSFTConfig()
    if isinstance(config, Mapping):
        return TrainSFTConfig(**cast("Mapping[str, Any]", config))
    raise TypeError(f"config is a {type(config).__name__}, not art.TrainSFTConfig(learning_rate=...)")


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


LocalTrainResult = TrainResult
"""ART's name."""


class TrainSFTConfig(Displayed, Configuration):
    """The configuration of one call of `model.train_sft`: `learning_rate`, a number or a list with the rate of each optimizer step
    (5e-5); `batch_size`, the trajectories of an optimizer step ("auto", which is 2); `epochs`, passes over the trajectories (1);
    `assistant_turns`, "all" or "last": the messages that are trained; `best_of_group`, whether a group trains only its best
    trajectory (False); `max_grad_norm` (1.0). docs/howto/sft.md has examples.

    Raises:
        ValueError: a value is out of range, or a field is unknown. The message names the field, and its range or the field that
            was meant.
    """

    model_config = ConfigDict(extra="forbid")
    _other_names: ClassVar[Mapping[str, str]] = SFT_NAMES

    learning_rate: Annotated[float, Field(gt=0, le=1)] | list[Annotated[float, Field(ge=0, le=1)]] = 5e-5
    """A list has the rate of each optimizer step (`art.utils.sft.create_lr_schedule`)."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Trajectories of one optimizer step, in the given order. auto: 2."""
    assistant_turns: Literal["all", "last"] = "all"
    """The assistant's messages that are trained. The others are context."""
    best_of_group: bool = False
    """Whether a `TrajectoryGroup` trains only its trajectory with the highest reward. Groups with equal rewards are then left
    out."""
    epochs: int = Field(default=1, ge=1, le=64)
    """Passes over the trajectories, in the same order."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """A gradient with a larger norm is scaled down to this norm."""

    def to_train_config(self, held_out: int = 0) -> wire.TrainConfig:
        """The configuration of a train call whose last `held_out` trajectories are not trained. Its loss is the cross-entropy: the mean of -log p over the trained tokens of an
        optimizer step."""
        return wire.TrainConfig(
            objective="likelihood",
            learning_rate=self.learning_rate,
            # The server counts groups, and `sft.as_group` puts each trajectory into a group of its own.
            batch_size=2 if self.batch_size == "auto" else self.batch_size,
            passes=self.epochs,
            max_grad_norm=self.max_grad_norm,
            held_out=held_out,
            # Cross-entropy is of the model's own distribution, also for choices that were sampled at another temperature.
            sampling="raw",
            allow_training_without_logprobs=True,
        )


if not TYPE_CHECKING:  # with `__getattr__` a type checker would accept every misspelt name

    def __getattr__(name: str) -> Any:
        if name != "Choice":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Imported here, because importing openai takes most of a second.
        from openai.types.chat.chat_completion import Choice

        return Choice
