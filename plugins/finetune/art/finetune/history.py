"""What a run has finished, as rows, and NVIDIA's files that report it. `folder.py` keeps the rows, `plot.py` draws them.

Source of the files: `ARTTrainer.log_progress` of nvidia-nat-openpipe-art 1.9. Fields that its histories lack are added.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import art

METRICS_FILE = "training_metrics.jsonl"
REWARDS_FILE = "reward_history.json"
VALIDATIONS_FILE = "validation_history.json"
CURRICULUM_FILE = "curriculum_state.json"


def _now() -> str:
    return datetime.now(UTC).isoformat()


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A finished rollout."""

    epoch: int
    row: str
    """The id of its row of the data set."""
    generation: int
    session: str
    """The id under which the server has its requests."""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    turn_rewards: list[float | None] | None = None
    error: str | None = None
    """Why it failed. It has no reward then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRow:
    """A finished epoch. Rewards are None where there was no trajectory."""

    epoch: int
    timestamp: str = field(default_factory=_now)
    """ISO 8601, UTC."""
    avg_reward: float | None
    min_reward: float | None
    max_reward: float | None
    num_trajectories: int
    num_groups: int
    filtered_trajectories: int
    """Those that were trained."""
    filtered_groups: int
    filtered_avg_reward: float | None
    filtered_min_reward: float | None
    filtered_max_reward: float | None
    curriculum_percentile: float
    curriculum_state: dict[str, Any] | None = None
    """With a curriculum: current_percentile, last_expansion_epoch, total_groups and included_groups."""
    step: int
    """The model's step after the epoch."""
    num_without_signal: int = 0
    """Groups whose rewards are all equal."""
    num_failed: int = 0
    failures: dict[str, int] = field(default_factory=dict[str, int])
    """Failed rollouts by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRow:
    """A validation before an epoch, or after the last. A failed one has an error, no rewards and no examples."""

    epoch: int
    timestamp: str = field(default_factory=_now)
    avg_reward: float | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    num_examples: int = 0
    standard_error: float | None = None
    """None for a single example, as the interval."""
    interval: list[float] | None = None
    """The lower and the upper end of the 95% confidence interval."""
    step: int | None = None
    """The step that was evaluated; None for the base model."""
    error: str | None = None


def validation_row(epoch: int, evaluation: art.Evaluation) -> ValidationRow:
    """The row of a validation that succeeded."""
    rewards = [reward for reward in evaluation.scenario_rewards if reward is not None]
    estimate = evaluation.reward
    has_error = math.isfinite(estimate.standard_error)
    return ValidationRow(
        epoch=epoch,
        avg_reward=estimate.mean,
        min_reward=min(rewards),
        max_reward=max(rewards),
        num_examples=estimate.num_scenarios,
        standard_error=estimate.standard_error if has_error else None,
        interval=list(estimate.interval) if has_error else None,
        step=evaluation.step,
    )


def make_files(
    run_id: str, epochs: Sequence[EpochRow], validations: Sequence[ValidationRow], curriculum: Mapping[str, Any]
) -> dict[str, bytes]:
    """The contents of NVIDIA's files by name. `curriculum` is the section `finetuning.curriculum_learning`."""
    metrics = [json.dumps(_metrics(row, run_id)) + "\n" for row in epochs]
    files = {METRICS_FILE: "".join(metrics).encode(), REWARDS_FILE: _json([_rewards(row) for row in epochs])}
    if validations:
        files[VALIDATIONS_FILE] = _json([_present(row) for row in validations])
    state = epochs[-1].curriculum_state if epochs else None
    if state is not None:
        files[CURRICULUM_FILE] = _json(state | {"config": curriculum})
    return files


def _metrics(row: EpochRow, run_id: str) -> dict[str, Any]:
    fields = asdict(row)
    if row.curriculum_state is None:
        del fields["curriculum_state"]
    return {"epoch": row.epoch, "timestamp": row.timestamp, "run_id": run_id} | fields


def _rewards(row: EpochRow) -> dict[str, Any]:
    return {
        "epoch": row.epoch,
        "timestamp": row.timestamp,
        "avg_reward": row.avg_reward,
        "min_reward": row.min_reward,
        "max_reward": row.max_reward,
        "num_trajectories": row.num_trajectories,
        "filtered_avg_reward": row.filtered_avg_reward,
        "curriculum_percentile": row.curriculum_percentile,
    }


def _present(row: ValidationRow) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if value is not None}


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
