"""What the server asks of the trainer process, and what it answers: JSON lines over the process's pipes.

Token rows are resolved before they come here; nothing in the trainer knows of messages, templates or engines.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from art.wire import LoRAConfig, TrainConfig

BetweenSteps = Literal["stay", "leave", "reload"]
"""Where the trainer's base is between steps: on the device, in main memory, or nowhere, to be read again from its files."""


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
    """NaN and infinity keep their names on the pipe: as null, pydantic's default, a NaN log-probability would read as
    "context only" and its token would be dropped in silence."""


class Distribution(Record):
    """What a token was sampled from, beside the model's logits: the trainer scores it in the same way."""

    temperature: float = Field(default=1.0, gt=0)
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens, before the temperature divides."""
    kept: str | None = None
    """The tokens that stayed in play, base64 of `kept_set.pack_set`; None is the whole vocabulary."""


class Span(Record):
    """Tokens of a row whose record in the ledger is known: [start, stop), sampled at a step of the trained model."""

    start: int
    stop: int
    step: int


class Row(Record):
    """One run of tokens that the policy saw and wrote."""

    token_ids: list[int]
    logprobs: list[float | None]
    """As long as token_ids: the log-probability of the token under what it was sampled from (`distributions`);
    None at tokens that are context only."""
    distributions: list[int] = []
    """For each token an index into `Batch.distributions`, -1 for the model's own at temperature 1. Empty: -1 everywhere."""
    spans: list[Span] = []
    """In order. Tokens elsewhere are of unknown step."""
    truncated: bool = False
    """The conversation that it belongs to was cut at a length limit (finish_reason "length")."""
    recompute: list[int] = []
    """Positions that are trained although the engine's log-probability is unknown (None there): the trainer's own at
    the start of the step stands for it, so the ratio is 1."""
    advantages: dict[int, float] = {}
    """Advantages given per position; elsewhere the trajectory's holds."""
    rewards: dict[int, float] = {}
    """Rewards given for a turn, by the position of its last token (process supervision)."""


class TrainableTrajectory(Record):
    """One sequence: all of its rows share the reward. Without rows it cannot be trained, and its reward still counts among
    those of its group."""

    reward: float
    rows: list[Row]


class TrainableGroup(Record):
    trajectories: list[TrainableTrajectory]


class Batch(Record):
    """The resolved payload of a job: exactly what is trained, whatever happens later."""

    groups: list[TrainableGroup]
    distributions: list[Distribution] = []
    """Each once; rows refer to them."""


class InitTask(Record):
    """Write a fresh adapter (step 0: the policy is the base model) into out_dir."""

    kind: Literal["init"] = "init"
    lora: LoRAConfig
    out_dir: str
    seed: int = 0


class CheckTask(Record):
    """See that the adapter in a folder, and its optimizer's state where there is one, are of this shape on the base; fails
    with "bad_checkpoint" otherwise."""

    kind: Literal["check"] = "check"
    lora: LoRAConfig
    folder: str


class LoadTask(Record):
    """Load the base model, so that the first step does not wait for it."""

    kind: Literal["load"] = "load"


class GapBars(Record):
    """What the gap between the engine's log-probabilities and the trainer's means (`gap.py`)."""

    high: float
    """A mean above this is worth a note."""
    wrong: float
    """A mean above this trains nothing."""
    largest: float | None = None
    """A single token's gap above this trains nothing."""


class TrainTask(Record):
    """The optimizer steps of one job, from in_dir's adapter (and optimizer state, when it is there) into out_dir."""

    kind: Literal["train"] = "train"
    lora: LoRAConfig
    in_dir: str
    out_dir: str
    config: TrainConfig
    batch: Batch = Batch(groups=[])
    """The server holds it as JSON, and passes it on unread (`TrainerProcess.run`)."""
    start_step: int = 0
    """The model's step in in_dir: tokens that it sampled show the gap between engine and trainer."""
    seed: int = 0
    """Fixes the order of groups in several optimizer steps."""
    gap_bars: GapBars | None = None
    """None: the gap is measured, and not judged."""
    budget_divisor: int = Field(default=1, ge=1)
    """How many times fewer tokens go through the model at a time than usually: for a job under which the process died."""


Task = Annotated[InitTask | CheckTask | LoadTask | TrainTask, Field(discriminator="kind")]


class Ready(Record):
    """The trainer's first line: it takes tasks."""

    event: Literal["ready"] = "ready"


class Progress(Record):
    event: Literal["progress"] = "progress"
    phase: str
    completed: int
    total: int


class Done(Record):
    event: Literal["done"] = "done"
    metrics: dict[str, float]
    unchanged: bool = False
    """True when the batch held no learning signal: the weights are those of in_dir."""
    notes: list[str] = []
    """What the trainer decided by itself, as sentences for the job's report."""


class Failed(Record):
    event: Literal["failed"] = "failed"
    code: str
    message: str
    retryable: bool = False
    """The same task may succeed later, unchanged."""


Answer = Annotated[Ready | Progress | Done | Failed, Field(discriminator="event")]
