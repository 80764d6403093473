"""The wire: every body that client and server exchange, defined once and used by both sides.

Requests refuse unknown fields; the client ignores what it does not know in replies. Trajectories travel as plain
dictionaries (messages and OpenAI choices), so neither side needs the `openai` package to parse a body.
Routes, all under the control port:

    POST   /api/models                               RegisterRequest -> ModelInfo
    GET    /api/models                               -> ModelList
    GET    /api/models/{project}/{name}              -> ModelInfo
    POST   /api/models/{project}/{name}/train        TrainRequest (+ Idempotency-Key) -> NDJSON of JobEvent
    POST   /api/models/{project}/{name}/log          LogRequest -> LogReply
    DELETE /api/models/{project}/{name}              -> ModelInfo of what was deleted
    POST   /api/models/{project}/{name}/fork         ForkRequest -> ModelInfo of the new model
    POST   /api/models/{project}/{name}/rollback     RollbackRequest -> ModelInfo
    GET    /api/models/{project}/{name}/checkpoints  -> CheckpointList
    POST   /api/models/{project}/{name}/checkpoints/delete   DeleteCheckpointsRequest -> DeleteCheckpointsReply
    GET    /api/models/{project}/{name}/checkpoints/{step}.tar   (+ Range) -> the checkpoint as a tar
    PUT    /api/models/{project}/{name}/checkpoints/{step}.tar   a tar (+ Content-Range) -> UploadReply
    GET    /api/models/{project}/{name}/sessions/{session}   -> SessionReply
    GET    /api/jobs[?state=queued,running&limit=100]        -> JobList
    GET    /api/jobs/{job_id}                        -> JobInfo
    GET    /api/jobs/{job_id}/events[?after=NUMBER]  -> NDJSON of JobEvent
    DELETE /api/jobs/{job_id}                        cancels it -> JobInfo
    POST   /api/jobs/{job_id}/move                   MoveJobRequest -> JobList
    GET    /health, /ready                           -> Health
"""

import math
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

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


def is_none(value: object) -> bool:
    """For fields that are left out where they say nothing, so that other programs read what they know."""
    return value is None


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
    """One conversation of a trajectory: the first, a sub-agent's, or the part after a context reset."""

    messages_and_choices: list[dict[str, Any]]
    """OpenAI messages and, for what the policy sampled, OpenAI choices (known by `message` and `finish_reason`)."""
    tools: list[dict[str, Any]] | None = None
    turn_rewards: list[FiniteFloat | None] | None = Field(default=None, exclude_if=is_none)
    """A reward for each choice, beside the trajectory's: it counts for the tokens up to its turn's end (process
    supervision)."""
    turn_advantages: list[FiniteFloat | list[FiniteFloat] | None] | None = Field(
        default=None, exclude_if=is_none
    )
    """For each choice an advantage, or one for each of its tokens, that stands for what rewards would give."""


class TrajectoryBody(HistoryBody):
    reward: FiniteFloat
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


class LossConfig(Body):
    """Which loss is minimised: a value of this record is a member of the GRPO family (PRESETS names the published ones).

    r is the ratio pi_new / pi_old of a trained token, A its trajectory's advantage. pi_old is the policy at the start of
    the job, pi_sampled the engine's. Every average is taken over the whole optimizer step. Formulas and sources:
    docs/training.md.
    """

    ratio_to: Literal["start", "sampled"] = "start"
    """What r compares the policy with: start is pi_old, computed by the trainer, and `correction` weighs what separates
    it from the engine; sampled is pi_sampled, with the correction off (ART's meaning of its options)."""
    ratio: Literal["token", "sequence", "geometric"] = "token"
    """sequence: exp of the trajectory's mean log-ratio (GSPO); geometric: sqrt(token * sequence)."""
    clip: Literal["two_sided", "dual", "cispo", "none"] = "two_sided"
    """two_sided: min(r A, clip(r) A); dual: that, but at least dual_clip * A where A < 0; cispo: clip(r) without
    gradient weighs A log pi; none: r A."""
    epsilon: float = Field(default=0.2, gt=0)
    """r is clipped below at 1 - epsilon."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """...and above at 1 + epsilon_high; None takes epsilon."""
    dual_clip: float = Field(default=3.0, gt=1)
    """With clip="dual": the largest ratio that a token with a negative advantage still answers to."""

    normalisation: Literal["tokens", "trajectory", "constant"] = "tokens"
    """Sum over trained tokens divided by their number; or mean over trajectories of each one's mean; or sum divided by
    (number of trajectories * constant_length)."""
    constant_length: int = Field(default=1024, ge=1)

    baseline: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    """What a reward is compared with: the mean of its group, of the others in its group, or nothing."""
    scaling: Literal["group_std", "batch_std", "none"] = "group_std"
    """What advantages are divided by: the standard deviation of the group's rewards, of all advantages, or nothing."""

    correction: Literal["off", "truncate", "mask", "sequence_mask"] = "truncate"
    """The weight c = pi_old / pi_sampled of a token's policy term. truncate: min(c, correction_high); mask: c, but 0
    outside [correction_low, correction_high]; sequence_mask: likewise the geometric mean of the trajectory's c; off: 1."""
    correction_high: float = Field(default=2.0, gt=0)
    correction_low: float = Field(default=0.0, ge=0)

    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty against the reference (the base model, adapter off); 0 leaves it out."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward", "advantage"] = "loss"
    """loss: a term of the loss; reward: subtracted from each trajectory's reward; advantage: beta * (mean KL - KL of
    the token) is added to each token's advantage. The last two take the sampler's log-probabilities."""

    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the entropy at trained tokens, added to what is maximised."""

    overlong: Literal["keep", "mask", "soft_penalty"] = "keep"
    """What becomes of trajectories cut at a length limit: trained as they are; left out; or, for all, a reward that
    falls linearly to -1 over the last overlong_buffer of overlong_length trained tokens."""
    overlong_length: int | None = Field(default=None, ge=1)
    overlong_buffer: int | None = Field(default=None, ge=1)


PRESETS: dict[str, LossConfig] = {
    "grpo": LossConfig(),
    "dr_grpo": LossConfig(normalisation="constant", scaling="none"),
    "dapo": LossConfig(epsilon_high=0.28),
    "gspo": LossConfig(
        ratio="sequence", epsilon=3e-4, epsilon_high=4e-4, normalisation="trajectory"
    ),
    "cispo": LossConfig(clip="cispo", epsilon=1.0, epsilon_high=4.0),
    "rloo": LossConfig(
        clip="none",
        baseline="leave_one_out",
        scaling="none",
        normalisation="constant",
        constant_length=1,
    ),
    "reinforce_pp": LossConfig(scaling="batch_std"),
    "ppo": LossConfig(clip="dual", scaling="batch_std"),
}
"""The family by published names. Sources: docs/training.md."""


class TrainConfig(LossConfig):
    """How one train call updates the policy. Defaults: GRPO with group mean and standard deviation, tokens
    normalised over the batch, one AdamW step without weight decay (Shao et al. 2024, arXiv:2402.03300)."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"] = (
        "grpo"
    )
    """Where the fields of the loss come from that are not given."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = 5e-6
    """auto: from the model's width, see docs/training.md; the job's report tells the value."""
    warmup_steps: int = Field(default=0, ge=0)
    """The learning rate rises linearly over these first steps of the model."""
    schedule: Literal["constant", "cosine"] = "constant"
    schedule_steps: int | None = Field(default=None, ge=1)
    """With cosine: the step of the model at which the learning rate has fallen to 0."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    passes: int = Field(default=1, ge=1, le=64)
    """How often the job goes through its groups."""
    mini_batches: int = Field(default=1, ge=1, le=1024)
    """Into how many optimizer steps each pass divides the groups, shuffled anew in each pass."""
    sampling: Literal["as_sampled", "raw"] = "as_sampled"
    """What a token's log-probability means, for the sampler's figure and the trainer's alike: under the distribution that
    it was really sampled from (temperature, kept set, logit bias), or the model's own at temperature 1."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Tokens that were sampled more steps before the one which the job starts from are context only, and counted. None:
    the truncated weight is all that bounds them."""
    allow_training_without_logprobs: bool = False
    """Also train assistant messages that were not sampled here: plain dictionaries, and choices of which no tokens are
    known. They are tokenised, and the trainer takes its own log-probabilities for them."""
    plot_tensors: bool = False
    """Draw the packed trees of the step into the checkpoint's folder."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:  # Any: whatever is to be validated
        if not isinstance(given, dict):
            return given
        fields = cast("dict[str, Any]", given)
        if fields.get("ratio_to") == "sampled":
            fields = {"correction": "off", **fields}
        preset = PRESETS.get(str(fields.get("preset", "grpo")))
        return fields if preset is None else {**preset.model_dump(exclude_unset=True), **fields}

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.schedule == "cosine" and self.schedule_steps is None:
            raise ValueError("schedule='cosine' needs schedule_steps")
        if self.overlong == "soft_penalty" and (
            self.overlong_length is None or self.overlong_buffer is None
        ):
            raise ValueError("overlong='soft_penalty' needs overlong_length and overlong_buffer")
        if self.ratio_to == "sampled" and self.correction != "off":
            raise ValueError(
                f"correction='{self.correction}' weighs pi_old / pi_sampled, which ratio_to='sampled' already holds:"
                " leave correction out, or set ratio_to='start'"
            )
        if self.correction_low > self.correction_high:
            raise ValueError("correction_low is above correction_high")
        return self


class TrainRequest(Body):
    groups: list[TrajectoryGroupBody] = Field(min_length=1)
    config: TrainConfig = TrainConfig()
    expected_step: int | None = Field(default=None, ge=0)
    """The step that the trajectories were sampled with: where the model has another by now, or a job that will move it, the
    request is refused."""


class Dropped(Reply):
    """Why something in a job was not trained."""

    reason: str
    count: int
    examples: list[str] = []
    """Where: paths such as "groups[0].trajectories[2].messages_and_choices[1]", the first few."""


class JobReport(Reply):
    """What a job was made of, fixed when the server accepted it; the notes grow until it is done."""

    num_groups: int = 0
    num_groups_trained: int = 0
    num_trajectories: int = 0
    num_trajectories_trained: int = 0
    num_failed_rollouts: int = 0
    num_rows: int = 0
    num_trained_tokens: int = 0
    num_tokens_without_logprob: int = 0
    """Trained with ratio 1, because the log-probability under what they were sampled from is unknown."""
    sampled_steps: dict[int, int] = {}
    """Sampled tokens by the model's step that sampled them, where the ledger knows it."""
    turns: dict[str, int] = {}
    """Trained turns by the way in which their tokens were found: carried "ids", the "ledger", ids in the
    "logprob_entries", "rendered" again from the text, "recomputed" (rendered, without log-probabilities)."""
    continuations: dict[str, int] = {}
    """How later turns go on: "joined" to the row of exact tokens before them, or on a new row because the template
    "dropped" content, the agent sent no thinking and answers that differ in it fit ("ambiguous"), rendering changed
    tokens ("retokenized", with splicing off), or the context "changed"."""
    dropped: list[Dropped] = []
    config: dict[str, Any] = {}
    """The values in force."""
    notes: list[str] = []
    """What else the client should know: settings without effect, and what the trainer decided by itself."""


JobState = Literal["queued", "running", "done", "failed", "cancelled"]


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
    """Why it failed; of a queued job, why its last try did not end."""
    created_at: float = 0.0
    """Seconds since 1970."""
    waits_for: str | None = None
    """What keeps it from going on."""


class JobList(Reply):
    jobs: list[JobInfo]
    """Those that have not ended in the order in which they run, then the others, the latest first."""


class MoveJobRequest(Body):
    before: str | None = None
    """The queued job that it is to run before; None: the end of the queue."""


class JobEvent(Reply):
    """One line of a train request's answer. The stream ends with `done` or `error`."""

    event: Literal["accepted", "progress", "waiting", "done", "error"]
    job_id: str
    number: int | None = None
    """Grows from one to the next; `GET /api/jobs/{job_id}/events?after=NUMBER` goes on behind it."""
    phase: str | None = None
    """With `progress` and `waiting`: "queued", "train", "save", "load"..."""
    completed: int | None = None
    total: int | None = None
    waits_for: str | None = None
    """What keeps the job from going on: other jobs, the engine's start, another try after an error."""
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


class CheckpointInfo(Reply):
    """One kept step."""

    step: int
    created_at: float
    """Seconds since 1970."""
    metrics: dict[str, float] = {}
    """The step's row of the history. `train/*` in it was measured on the samples that the step was trained from."""
    size_bytes: int
    unchanged: bool = False
    """The step holds the weights of the one before it: its batch carried no signal."""
    is_serving: bool = False
    is_best: bool = False


class CheckpointList(Reply):
    checkpoints: list[CheckpointInfo]
    """Oldest first."""
    best_metric: str | None = None
    """What `is_best` is judged by: "val/reward" where the history has it, else "train/reward"."""


class DeleteCheckpointsRequest(Body):
    best_metric: str | None = Field(default=None, max_length=256)
    """Keep the step with the best mean of this metric in the history, besides the newest. None: "val/reward" where the
    history has it, else "train/reward"."""
    keep: list[int] | None = None
    """Or name the steps to keep, besides the newest."""


class DeleteCheckpointsReply(Reply):
    kept: list[int]
    """With the step that serves and those that requests sample from, which stay in any case."""
    deleted: list[int]


class ForkRequest(Body):
    """A new model from a step of another."""

    name: Name
    project: Name
    step: int | None = Field(default=None, ge=0)
    """None: the one that serves."""


class RollbackRequest(Body):
    step: int = Field(ge=0)
    """The kept step that is to be the newest."""


class UploadReply(Reply):
    """How far an upload has come."""

    received_bytes: int
    model: ModelInfo | None = None
    """Once the whole has arrived: the model that has the step."""


# --- sessions -----------------------------------------------------------------------------------------------------


SESSION_HEADER = "x-art-session"
"""Request header that names the rollout a request belongs to. `/s/SESSION/v1` as base URL and `KEY::SESSION` as API key
say the same, for agents of which only one of these can be set."""


class SessionReply(Reply):
    """What one model said in one session, as a trajectory's conversations."""

    histories: list[HistoryBody]
    """Each conversation, in the order in which they began; a request that continues an earlier one extends it."""
    num_choices: int
    """Choices in the histories."""
    unused: dict[str, int] = {}
    """Choices left out, by reason: not delivered in full, or never continued while another of the same prompt was."""


# --- health -------------------------------------------------------------------------------------------------------


class Health(Reply):
    status: Literal["ok"] = "ok"
    engine: Literal["none", "starting", "ready", "failed"] = "none"
    base_model: str | None = None
    version: str = ""
    detail: str | None = None
    """While the engine is not ready: why, with its last log line."""
    waits_for: str | None = None
    """What inference waits for, while it waits."""
    longest_stall_seconds: float = 0.0
    """How long the server's event loop stood still at most since its start."""
    faults: dict[str, str] = {}
    """Parts of the server that do not work just now, each with its last error: "job runner", "records"..."""
