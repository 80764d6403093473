"""The protocol of a model's backend. Models have the type `Any`, because the module `model` imports this module."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from art.job import Job
from art.trajectories import Trajectory, TrajectoryGroup
from art.types import TrainResult
from art_protocol.learning import Feedback, FeedbackToken, FeedbackTokenRequest, LearningInfo, Policy, Score
from art_protocol.wire import (
    CheckpointList,
    DeleteCheckpointsReply,
    ModelInfo,
    SessionReply,
    TrainConfig,
)


class ServerBackend(Protocol):
    """The methods of `art.Backend` that models call."""

    @property
    def base_url(self) -> str: ...

    async def close(self) -> None: ...

    async def register(self, model: Any) -> None: ...

    async def train(
        self,
        model: Any,
        groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        verbose: bool = False,
        idempotency_key: str | None = None,
        expected_step: int | None = None,
    ) -> TrainResult: ...

    async def submit(
        self,
        model: Any,
        groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        *,
        idempotency_key: str | None = None,
        expected_step: int | None = None,
    ) -> Job: ...

    async def _feedback(self, model: Any, feedback: Feedback) -> Score: ...

    async def _feedback_token(self, model: Any, request: FeedbackTokenRequest) -> FeedbackToken: ...

    async def _learn(self, model: Any, policy: Policy) -> LearningInfo: ...

    async def _learning(self, model: Any) -> LearningInfo: ...

    def _model_inference_name(self, model: Any, step: int | None = None) -> str: ...

    async def _prepare_backend_for_training(self, model: Any) -> tuple[str, str]: ...

    async def _get_step(self, model: Any) -> int: ...

    def _reporting_start(self) -> AbstractContextManager[None]: ...

    async def _fetch_session(self, model: Any, session: str) -> SessionReply: ...

    async def _log(
        self,
        model: Any,
        trajectories: Iterable[Trajectory | BaseException] | Iterable[TrajectoryGroup],
        split: str,
        *,
        metrics: dict[str, float] | None = None,
        step: int | None = None,
    ) -> dict[str, float]: ...

    async def _list_checkpoints(self, model: Any) -> CheckpointList: ...

    async def _delete_checkpoints(
        self,
        model: Any,
        *,
        best_metric: str | None = None,
        steps_to_keep: list[int] | None = None,
    ) -> DeleteCheckpointsReply: ...

    async def _fork(self, model: Any, name: str, project: str, step: int | None) -> ModelInfo: ...

    async def _roll_back(self, model: Any, step: int) -> None: ...

    async def _delete(self, model: Any) -> None: ...
