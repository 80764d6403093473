"""The messages between server and trainer process, JSON lines over its pipes: tasks to the trainer, answers back.

The server resolves all token sequences, so the trainer knows nothing of chat messages, templates or engines.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from art_protocol.wire import LoRAConfig, TeacherTop, TrainConfig

BetweenSteps = Literal["stay", "leave", "reload"]
"""The base model between steps: it stays on the device, leaves it for main memory, or is loaded again from files."""


class TrainerMessage(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        ser_json_inf_nan="constants",
        validate_by_name=True,
        serialize_by_alias=True,
    )
    """NaN and infinity are written by name. As null, pydantic's default, a NaN log-probability would mean "context
    only", and its token would silently not be trained."""


class WorkerConfig(TrainerMessage):
    """How a trainer process works; its command line has this as JSON."""

    base_model: str
    """A folder with safetensors, or a Hugging Face id."""
    trainer: Literal["auto", "unsloth", "peft"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The base model's number type."""
    device: str = "auto"
    """auto, cpu or cuda:NUMBER."""
    between_steps: BetweenSteps = "stay"
    max_seq_length: int | None = None
    """The longest sequence that Unsloth is loaded for; None is the model's own limit."""
    threads: int | None = None
    """CPU threads of torch; None is torch's choice."""
    max_tokens_per_micro_batch: int | None = None
    """None: as many tokens as fit the device."""
    checkpointing_factor: float | None = None
    """How many times more tokens fit with gradient checkpointing; None is the policy's estimate."""
    base_name: str | None = None
    """The base model's name in stored token budgets, the same on all machines. None is `base_model`."""
    machine: str = "this machine"
    """The machine on which the process runs, for messages."""
    rank: int = 0
    num_ranks: int = 1
    """Processes that train one job together (`trainer/gang_view.py`)."""
    meeting: str | None = None
    """The file or address at which several ranks find each other (`trainer/gang_view.py`); None before they start."""
    is_sharded: bool = False
    """Whether the ranks share the base's weights."""


class Distribution(TrainerMessage):
    """How a token's behaviour policy differs from the model's own distribution. The trainer scores tokens
    under the behaviour policy."""

    temperature: float = Field(default=1.0, gt=0)
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens, before they are divided by the temperature."""
    kept: str | None = None
    """The kept set: base64 of `kept_set.pack_set`. None is the whole vocabulary."""


class SampledSpan(TrainerMessage):
    """Tokens [start, stop) of a sequence that the trained model sampled at `step`. The step is from their record in the
    ledger or, without a record, from their choice; the log-probabilities are then unknown."""

    start: int
    stop: int
    step: int


class TaughtSpan(TrainerMessage):
    """Tokens [start, stop) of a sequence with a teacher's log-probabilities, which `teacher_top.read_top` reads."""

    start: int
    stop: int
    top: TeacherTop


class TokenSequence(TrainerMessage):
    """A run of tokens that the policy read and wrote."""

    token_ids: list[int]
    logprobs: list[float | None]
    """For each token its log-probability under the distribution that it was sampled from (`distributions`).
    None for context, and for positions in `recompute`."""
    distributions: list[int] = []
    """For each token an index into `Batch.distributions`; -1 is the model's own at temperature 1. Empty: -1 for all."""
    spans: list[SampledSpan] = []
    """In order. The step of tokens outside of spans is unknown."""
    truncated: bool = False
    """Whether the sequence's conversation was cut at a length limit (finish_reason "length")."""
    recompute: list[int] = []
    """Positions that are trained although the engine's log-probability is unknown (None). The trainer's own
    log-probability at the start of the job is used instead, so the ratio pi_old / pi_sampled is 1."""
    advantages: dict[int, float] = {}
    """Advantages by position, as the client gave them. Other tokens have their trajectory's advantage plus their
    turns' advantages."""
    taught: list[TaughtSpan] = []
    """In order. Tokens outside of these spans have no teacher."""
    rewards: list[tuple[int, float]] = []
    """Rewards of turns, each with the position of the turn's last token (process supervision). Dropped turns have no
    tokens: all dropped turns between the same two turns have one position."""
    turns: list[tuple[int, int]] = []
    """For each turn the index behind its last token, and the time of its request (`clock.tick`). Empty: some times are
    unknown."""

    @field_validator("rewards", mode="before")
    @classmethod
    def _from_positions(cls, value: object) -> object:
        """Accepts what commit 72080d0 wrote into jobs on disk: an object, rewards by position."""
        return list(value.items()) if isinstance(value, dict) else value


class TrainableTrajectory(TrainerMessage):
    """A trajectory; its sequences share the reward. Without sequences it is not trained, but its reward counts in its
    group."""

    reward: float
    sequences: list[TokenSequence] = Field(validation_alias="rows", serialization_alias="rows")
    """`rows` in JSON, because a queue may hold jobs of commit 72080d0."""


class TrainableGroup(TrainerMessage):
    trajectories: list[TrainableTrajectory]
    number: int | None = None
    """The group's index in the request; the batch lacks groups without a trainable turn. None: the index in the batch."""


class Batch(TrainerMessage):
    """The resolved payload of a job: exactly the tokens and rewards that are trained."""

    groups: list[TrainableGroup]
    distributions: list[Distribution] = []
    """Each distinct distribution once; sequences refer to them by index."""
    num_groups: int | None = None
    """Number of groups in the request that may be trained. None: the number of groups here."""
    held_out: list[TrainableGroup] = []
    """Demonstrations whose loss under the new step is measured (`TrainConfig.held_out`)."""


class LoadTask(TrainerMessage):
    """Loads the base model, so that the first step does not wait for it."""

    kind: Literal["load"] = "load"


class MismatchLimits(TrainerMessage):
    """Thresholds for the gap between the engine's and the trainer's log-probabilities (`same_policy.py`)."""

    high: float
    """A mean above this is noted in the job's report."""
    wrong: float
    """A mean above this fails the job."""
    largest: float | None = None
    """A single token's gap above this fails the job; None: any gap is accepted."""
    epsilon: float = 0.0
    """If engine or trainer computes in 16 bits, the standard deviation of a number's rounding, relative to the number:
    the trainer measures with it what rounding does to the probe. 0: the probe's limit is `wrong`."""


class Probe(TrainerMessage):
    """A few tokens and their log-probabilities under a step, by the trainer. The engine scores the same tokens before the
    step serves. Log-probabilities are in nats, at temperature 1, one for each token but the first."""

    token_ids: list[int] = []
    """Empty until a job of the model changes weights."""
    logprobs: list[float] = []
    """Log-probabilities under the step or, if `num_skipped` is not 0, under an earlier step."""
    num_skipped: int = 0
    """Number of steps since the step of `logprobs`. The engine compares only if it is 0."""
    base_logprobs: list[float] = []
    """Log-probabilities with the adapter off."""
    rounding: float = 0.0
    """Root mean square of the gaps that rounding to 16 bits explains; 0 if both sides compute in float32."""
    factor: int = 1
    """The multiple of the adapter's alpha in `scaled_logprobs`."""
    scaled_logprobs: list[float] = []
    """Log-probabilities with alpha times `factor`. Empty if the adapter's own effect is large enough to be compared."""
    age: int = 0
    """Steps for which these tokens have been used."""
    moved: list[float] = []
    """For each of the newest steps, in order: root mean square of the change of its probe's log-probabilities since the
    probe before. A step without a probe has the number of the step before it."""
    seconds: float = 0.0
    """The time that the trainer needed to score these tokens the last time."""
    made_at: float = 0.0
    """When the trainer scored them the last time: seconds since 1970."""

    @property
    def is_of_step(self) -> bool:
        """Whether the engine has something to compare."""
        return bool(self.token_ids) and not self.num_skipped


class LayersTask(TrainerMessage):
    """Writes an adapter of random weights for each kind of layer into a folder of out_dir that is named after the kind, and
    scores a probe for each. Layers of other kinds keep the base's weights."""

    kind: Literal["layers"] = "layers"
    lora: LoRAConfig
    out_dir: str
    mismatch_limits: MismatchLimits
    max_seq_length: int | None = None


class TrainTask(TrainerMessage):
    """Takes the optimizer steps of one job, from the adapter (and optimizer state, if any) in in_dir, into out_dir."""

    kind: Literal["train"] = "train"
    lora: LoRAConfig
    in_dir: str
    out_dir: str
    config: TrainConfig
    batch: Batch = Batch(groups=[])
    """The server has the batch as JSON and inserts it without parsing (`TrainerProcess.run`)."""
    start_step: int = 0
    """The model's step in in_dir. Tokens sampled at this step measure the gap between engine and trainer."""
    optimizer_steps: int | None = None
    """Optimizer steps that made the adapter in in_dir. None, for a checkpoint of another program: the steps of
    its optimizer state."""
    max_seq_length: int | None = None
    """The engine's context, on which some rotary embeddings depend. None: the model's number of positions."""
    seed: int = 0
    """Fixes the order of groups when the job takes several optimizer steps."""
    mismatch_limits: MismatchLimits | None = None
    """None: the gap is measured but not judged, and no probe is made."""
    probe: Probe | None = None
    """The probe of the step in in_dir, if the step's job made one."""
    lost_layers: list[str] = []
    """Kinds of layers whose adapters the engine does not apply (`trainer/layers.py`): they are not trained."""
    budget_divisor: int = Field(default=1, ge=1)
    """Divides the number of tokens per micro-batch, for a job during which the process died."""
    checkpointing: bool = False
    """Whether gradient checkpointing is on from the start, as in a job that `scripts/replay.py` repeats."""
    budgets: dict[str, int] = {}
    """Token budgets that fitted after memory ran out in earlier jobs, by key (`trainer/token_budget.py`)."""


Task = Annotated[LoadTask | LayersTask | TrainTask, Field(discriminator="kind")]


class Ready(TrainerMessage):
    """The trainer's first line: the process takes tasks, and computes them once the rest of the trainer is imported."""

    event: Literal["ready"] = "ready"
    facts: dict[str, str] = {}
    """What must be equal on all ranks, by name (`trainer/facts.py`)."""


class Progress(TrainerMessage):
    event: Literal["progress"] = "progress"
    phase: str
    completed: int
    total: int


class Learned(TrainerMessage):
    """A token budget that fitted, or that the next try is to have, after memory ran out. The server stores it."""

    event: Literal["learned"] = "learned"
    key: str
    tokens: int


class Done(TrainerMessage):
    event: Literal["done"] = "done"
    metrics: dict[str, float]
    losses: list[float] = []
    """After a train task: the loss of each optimizer step."""
    unchanged: bool = False
    """True if no token was trained, or only at rate 0: in_dir has the same weights."""
    optimizer_steps: int | None = None
    """After a train task: optimizer steps that made the adapter in out_dir."""
    notes: list[str] = []
    """Decisions and observations of the trainer, as sentences for the job's report."""
    probe: Probe | None = None
    """After a train task with limits: what the engine must reproduce before the step serves."""
    layer_probes: dict[str, Probe] = {}
    """After a layers task: what the engine must reproduce with each adapter, by kind of layer."""
    environment: dict[str, str] = {}
    """After a train task: what decides the last bits of its result. Versions, device, thread count, number type, tokens at a
    time (at the start and, after memory ran out, at the end), gradient checkpointing, the engine's context and the optimizer
    steps before the task."""


UNLIKE_RANKS = "unlike_ranks"
"""The error code for ranks that do not compute alike. A job is not the cause: it is tried again until the machines
are alike."""


class Failed(TrainerMessage):
    event: Literal["failed"] = "failed"
    code: str
    message: str
    retryable: bool = False
    """The unchanged task may succeed later."""


TrainerReply = Annotated[Ready | Progress | Learned | Done | Failed, Field(discriminator="event")]


def difference_of_ranks(machines: Sequence[str], facts: Sequence[Mapping[str, str]]) -> str | None:
    """The sentence that names two machines whose ranks have unlike facts, and the facts in which they differ; None if all
    ranks have the same facts."""
    first = facts[0]
    for rank, other in enumerate(facts):
        names = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        if names:
            listed = ", ".join(f"{name} {first.get(name, 'none')} and {other.get(name, 'none')}" for name in names)
            return (
                f"rank 0 on {machines[0]} and rank {rank} on {machines[rank]} do not compute alike: {listed}. Nothing was "
                "trained. Give both machines the same kind of device and the same packages, or let only one of them offer ranks "
                "(--ranks 0 on the other)"
            )
    return None
