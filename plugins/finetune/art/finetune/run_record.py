"""The finished work of a run, as rows, and NVIDIA's files, which are made from the rows. `folder.py` keeps the rows, `plot.py`
draws them.

Source of the files: `ARTTrainer.log_progress` of nvidia-nat-openpipe-art 1.9. The rows have more fields than NVIDIA's histories.
"""

import json
import math
import random
import statistics
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field

import art
from art.estimates import Estimate
from art_protocol.wire import is_none

METRICS_FILE = "training_metrics.jsonl"
REWARDS_FILE = "reward_history.json"
VALIDATIONS_FILE = "validation_history.json"
CURRICULUM_FILE = "curriculum_state.json"
REWARDS_FIELDS = {
    *("epoch", "batch", "timestamp", "avg_reward", "min_reward", "max_reward", "num_trajectories"),
    *("filtered_avg_reward", "curriculum_percentile"),
}


def _now() -> str:
    return datetime.now(UTC).isoformat()


class StoredRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BatchRecord(StoredRecord):
    """A record of a batch (`batches.py`), or of what comes before a batch."""

    epoch: int
    batch: int | None = Field(default=None, exclude_if=is_none)
    """The number of the batch, from 0 over all epochs. None: the batch is the whole epoch."""

    @property
    def number(self) -> int:
        """The number of the batch, also where the batch is the whole epoch."""
        return self.epoch if self.batch is None else self.batch


class RolloutRecord(BatchRecord):
    """A rollout by name, and its result once the rollout has finished: a reward, or an error."""

    row: str
    """The id of the rollout's row in the data set."""
    generation: int
    session: str
    """The id under which the server has the rollout's requests."""
    split: str = "train"
    """Either "train", or "val" for a validation before the batch."""
    model: str | None = None
    """For a validation: the name of the evaluated model, with its step."""
    num_answers: int = 1
    """The number of answers that can be trained."""
    reward: float | None = None
    metrics: dict[str, float | int | bool] = {}
    turn_rewards: list[float | None] | None = None
    error: str | None = None


class EpochRow(BatchRecord):
    """A finished epoch, or with `rows_per_step` a finished batch. Rewards are None without a trajectory. The fields `filtered_*` are
    about the trained groups only: a group without signal is not trained."""

    timestamp: str = Field(default_factory=_now)
    """ISO 8601, UTC."""
    run_id: str
    avg_reward: float | None
    min_reward: float | None
    max_reward: float | None
    num_trajectories: int
    num_groups: int
    filtered_trajectories: int
    filtered_groups: int
    filtered_avg_reward: float | None
    filtered_min_reward: float | None
    filtered_max_reward: float | None
    curriculum_percentile: float
    curriculum_state: dict[str, Any] | None = None
    """With a curriculum: current_percentile, last_expansion_epoch, total_groups and included_groups."""
    step: int
    """The model's step after the batch."""
    num_without_signal: int = 0
    """Groups whose rewards are all equal."""
    num_failed: int = 0
    num_answers: int = 0
    """Answers of all rollouts that can be trained."""
    num_cut: int = 0
    """Of these the answers that the token limit cut."""
    share_same: float = 0.0
    """The share of the rollouts that end with the most frequent last answer."""
    failures: dict[str, int] = {}
    """The number of failed rollouts, by reason."""

    @property
    def share_cut(self) -> float:
        """The share of the answers that the token limit cut."""
        return self.num_cut / self.num_answers if self.num_answers else 0.0


class ValidationRow(BatchRecord):
    """A validation before a batch, or after the last. A failed one has an error, no rewards and no examples."""

    timestamp: str = Field(default_factory=_now)
    avg_reward: float | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    num_examples: int = 0
    standard_error: float | None = None
    """None for a single example, like `interval`."""
    interval: tuple[float, float] | None = None
    """The interval of 95% confidence."""
    step: int | None = None
    """The step that was evaluated."""
    share_same: float | None = None
    """The share of the rollouts that end with the most frequent last answer; None for a failed validation."""
    error: str | None = None

    @property
    def estimate(self) -> Estimate:
        """The mean reward of a validation that succeeded, with its interval."""
        assert self.avg_reward is not None, "a failed validation has no reward"
        error = math.nan if self.standard_error is None else self.standard_error
        return Estimate(self.avg_reward, self.num_examples, error, self.interval or (-math.inf, math.inf))


class Asked(StoredRecord):
    """What a command asks for. The record of a run has what the last command asked for."""

    config: dict[str, Any]
    """The resolved file, without secrets."""
    rows: str = ""
    """A digest of the training rows; empty in a record of an earlier version."""
    validation: str = ""
    """A digest of the validation rows and of their reward; empty in a record of an earlier version."""
    workflow: str = ""
    """A digest of the source of the workflow's function; empty where there is none, or in a record of an earlier version."""
    rewards: dict[str, str] = {}
    """Digests of the sources of the functions of the training reward, by `_type`. A function without a source is left out."""


class State(Asked):
    """The record of a run."""

    run_id: str = Field(default_factory=lambda: f"art_run_{uuid.uuid4().hex[:8]}")
    seed: int = Field(default_factory=lambda: random.randrange(2**31))
    epochs: list[EpochRow] = []
    """The finished epochs, or with `rows_per_step` the finished batches, from 0 without a gap."""
    validations: list[ValidationRow] = []
    step: int | None = None
    """The model's step before the unfinished batch; None: the batch has not begun."""
    is_submitted: bool = False
    """Whether the server may have a job of the unfinished batch."""
    schedule_begins: int = 0
    """The optimizer steps that the model had taken before the run."""
    num_failed_jobs: int = 0
    """The number of failed train jobs of the unfinished batch."""

    @property
    def start(self) -> ValidationRow | None:
        """The validation before the first batch, unless this validation failed or there is none."""
        return next((row for row in self.validations if row.number == 0 and row.avg_reward is not None), None)

    @property
    def validations_of_trained(self) -> list[ValidationRow]:
        """The validations of the steps that the run trained, without those that failed."""
        first = min((row.step for row in self.epochs if row.filtered_groups), default=math.inf)
        rows = [row for row in self.validations if row.step is not None and row.step >= first]
        return [row for row in rows if row.avg_reward is not None]


def reward_figures(rewards: Sequence[float], prefix: str = "") -> dict[str, Any]:
    """The mean, the minimum and the maximum of rewards, as fields of a row."""
    return {
        f"{prefix}avg_reward": statistics.fmean(rewards) if rewards else None,
        f"{prefix}min_reward": min(rewards, default=None),
        f"{prefix}max_reward": max(rewards, default=None),
    }


FULL_REWARD = 1.0
"""The highest reward of most tasks. A lower one counts as high only where the run has seen rewards below."""


def solved_reward(rows: Sequence[EpochRow]) -> float | None:
    """The reward of all rollouts of the last batch, if the run has no higher one: the rows seem solved. Else None."""
    highest = max((row.max_reward for row in rows if row.max_reward is not None), default=None)
    if highest is None or rows[-1].min_reward != highest:
        return None
    is_above_others = any(row.min_reward is not None and row.min_reward < highest for row in rows)
    return highest if is_above_others or highest >= FULL_REWARD else None


def validation_row(position: Mapping[str, Any], evaluation: art.Evaluation) -> ValidationRow:
    """The row of a validation that succeeded. `position` has the fields that name the batch, and `share_same`."""
    estimate = evaluation.reward
    has_error = math.isfinite(estimate.standard_error)
    return ValidationRow(
        **position,
        **reward_figures([reward for reward in evaluation.scenario_rewards if reward is not None]),
        num_examples=estimate.num_scenarios,
        standard_error=estimate.standard_error if has_error else None,
        interval=estimate.interval if has_error else None,
        step=evaluation.step,
    )


def make_files(state: State) -> dict[str, bytes]:
    """NVIDIA's files by name."""
    epochs = [row.model_dump(exclude=None if row.curriculum_state else {"curriculum_state"}) for row in state.epochs]
    files = {
        METRICS_FILE: "".join(json.dumps(_finite(row), allow_nan=False) + "\n" for row in epochs).encode(),
        REWARDS_FILE: to_json([row.model_dump(include=REWARDS_FIELDS) for row in state.epochs]),
    }
    if state.validations:
        files[VALIDATIONS_FILE] = to_json([row.model_dump(exclude_none=True) for row in state.validations])
    if state.epochs and state.epochs[-1].curriculum_state:
        config = state.config["finetuning"]["curriculum_learning"]
        files[CURRICULUM_FILE] = to_json(state.epochs[-1].curriculum_state | {"config": config})
    return files


def to_json(value: object) -> bytes:
    """The content of a JSON file. JSON has neither NaN nor Infinity: both become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(field) for name, field in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in cast("Sequence[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
