"""The wire: every body that client and server exchange, defined once and used by both sides.

Requests refuse unknown fields; the client ignores what it does not know in replies. Trajectories travel as plain
dictionaries (messages and OpenAI choices), so neither side needs the `openai` package to parse a body.
Routes, all under the control port:

    POST   /api/models                               RegisterRequest -> ModelInfo
    GET    /api/models                               -> ModelList
    GET    /api/models/{project}/{name}              -> ModelInfo
    POST   /api/models/{project}/{name}/train        TrainRequest (+ Idempotency-Key) -> NDJSON of JobEvent
    POST   /api/models/{project}/{name}/log          LogRequest -> LogReply
    POST   /api/models/{project}/{name}/checkpoints/delete   DeleteCheckpointsRequest -> DeleteCheckpointsReply
    GET    /api/jobs/{job_id}                        -> JobInfo
    GET    /api/jobs/{job_id}/events                 -> NDJSON of JobEvent
    GET    /health, /ready                           -> Health
"""

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""What a project or model may be called: it becomes a folder, so no slash, no leading dot, at most 128 characters."""

IDEMPOTENCY_HEADER = "idempotency-key"
"""Header that names a train request: the same value again returns the same job."""

STEP_HEADER = "x-art-step"
"""Response header of every inference answer: the adapter step that sampled it."""


class Body(BaseModel):
    """A request: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Reply(BaseModel):
    """An answer: unknown fields are ignored, so an older client reads a newer server."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("must be a finite number, not NaN or infinity")
    return value


FiniteFloat = Annotated[float, AfterValidator(_finite)]
Number = Annotated[float | int | bool, AfterValidator(_finite)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Split = Annotated[str, Field(pattern=NAME_PATTERN)]


# --- errors -------------------------------------------------------------------------------------------------------


class ErrorDetail(Reply):
    """One error, in the shape that OpenAI clients already read."""

    message: str
    """What happened, to what, and what to do."""
    type: str = "invalid_request_error"
    code: str = "error"
    """Stable, for programs: `unknown_model`, `bad_name`, `no_trainable_turn`..."""
    param: str | None = None
    """The field at fault, as a path into the body."""
    retryable: bool = False
    """True: the same request may succeed later, unchanged."""


class ErrorBody(Reply):
    error: ErrorDetail


# --- models -------------------------------------------------------------------------------------------------------


class LoRAConfig(Body):
    """The adapter that is trained, fixed when a model is first registered."""

    rank: int = Field(default=8, ge=1, le=512)
    alpha: float = Field(default=16.0, gt=0)
    """Scale: the adapter's output is multiplied by alpha / rank."""
    target_modules: list[str] | None = None
    """Names of the linear layers to adapt; None adapts all of them but the output head."""


class RegisterRequest(Body):
    name: Name
    project: Name
    base_model: str = Field(min_length=1, max_length=1024)
    """A Hugging Face id, a folder on the server, "art/tiny" or "smollm2"."""
    lora: LoRAConfig | None = None
    """None: what the model was registered with before, or the defaults."""


class ModelInfo(Reply):
    name: str
    project: str
    base_model: str
    step: int
    """The newest whole checkpoint; 0 before the first train call."""
    inference_name: str
    """What to send as `model`: "PROJECT/NAME"; append "@k" for an earlier step."""
    lora: LoRAConfig
    max_seq_length: int | None = None
    """Tokens of prompt plus completion that the engine takes; None while no engine runs."""


class ModelList(Reply):
    models: list[ModelInfo]


# --- trajectories -------------------------------------------------------------------------------------------------


class HistoryBody(Body):
    """One more conversation of a trajectory: a sub-agent, or the part after a context reset."""

    messages_and_choices: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class TrajectoryBody(Body):
    messages_and_choices: list[dict[str, Any]]
    """OpenAI messages and, for what the policy sampled, OpenAI choices (known by `message` and `finish_reason`)."""
    reward: FiniteFloat
    tools: list[dict[str, Any]] | None = None
    additional_histories: list[HistoryBody] = []
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metrics: dict[str, Number] = {}
    metadata: dict[str, Any] = {}
    logs: list[str] = []


class FailureBody(Body):
    """A rollout that raised: counted, never a reward of zero."""

    type: str
    message: str
    traceback: str = ""


class TrajectoryGroupBody(Body):
    trajectories: list[TrajectoryBody]
    exceptions: list[FailureBody] = []
    metadata: dict[str, Any] = {}
    metrics: dict[str, Number] = {}
    logs: list[str] = []


# --- training -----------------------------------------------------------------------------------------------------


class TrainConfig(Body):
    """How one train call updates the policy. Defaults: GRPO with group mean and standard deviation, tokens
    normalised over the batch, one AdamW step without weight decay (Shao et al. 2024, arXiv:2402.03300)."""

    learning_rate: float = Field(default=5e-6, gt=0, le=1)
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty against the base model (adapter off), estimator k3; 0 leaves it out."""
    epsilon: float = Field(default=0.2, gt=0)
    """The ratio pi_new / pi_sampled is clipped below at 1 - epsilon."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """...and above at 1 + epsilon_high; None takes epsilon."""
    max_grad_norm: float = Field(default=1.0, gt=0)


class TrainRequest(Body):
    groups: list[TrajectoryGroupBody] = Field(min_length=1)
    config: TrainConfig = TrainConfig()


class Dropped(Reply):
    """Why something in a job was not trained."""

    reason: str
    count: int
    examples: list[str] = []
    """Where: paths such as "groups[0].trajectories[2].messages_and_choices[1]", the first few."""


class JobReport(Reply):
    """What a job was made of, fixed when the server accepted it."""

    num_groups: int = 0
    num_groups_trained: int = 0
    num_trajectories: int = 0
    num_trajectories_trained: int = 0
    num_failed_rollouts: int = 0
    num_rows: int = 0
    num_trained_tokens: int = 0
    turns: dict[str, int] = {}
    """Trained turns by the way in which their tokens were found: "ids", "ledger"..."""
    dropped: list[Dropped] = []
    config: dict[str, Any] = {}
    """The values in force."""


JobState = Literal["queued", "running", "done", "failed"]


class JobInfo(Reply):
    job_id: str
    project: str
    name: str
    state: JobState
    step: int | None = None
    """The step that the job made, when done."""
    metrics: dict[str, float] = {}
    report: JobReport = JobReport()
    error: ErrorDetail | None = None


class JobEvent(Reply):
    """One line of a train request's answer. The stream ends with `done` or `error`."""

    event: Literal["accepted", "progress", "waiting", "done", "error"]
    job_id: str
    phase: str | None = None
    """With `progress` and `waiting`: "queued", "train", "save", "load"..."""
    completed: int | None = None
    total: int | None = None
    step: int | None = None
    metrics: dict[str, float] = {}
    report: JobReport | None = None
    error: ErrorDetail | None = None


# --- logs and checkpoints -----------------------------------------------------------------------------------------


class LogRequest(Body):
    groups: list[TrajectoryGroupBody] = []
    split: Split = "val"
    step: int | None = Field(default=None, ge=0)
    """None: the model's newest step."""
    metrics: dict[str, FiniteFloat] = {}


class LogReply(Reply):
    step: int
    metrics: dict[str, float]
    """The row that was appended to history.jsonl."""


class DeleteCheckpointsRequest(Body):
    best_metric: str | None = "val/reward"
    """Keep the step with the best mean of this metric in the history, besides the newest."""
    keep: list[int] | None = None
    """Or name the steps to keep, besides the newest."""


class DeleteCheckpointsReply(Reply):
    kept: list[int]
    deleted: list[int]


# --- health -------------------------------------------------------------------------------------------------------


class Health(Reply):
    status: Literal["ok"] = "ok"
    engine: Literal["none", "starting", "ready", "failed"] = "none"
    base_model: str | None = None
    version: str = ""
    detail: str | None = None
    """While the engine is not ready: why, with its last log line."""
