"""Training: the adapter that calls `model.train` (`openpipe_art_trainer_adapter`), and the trainer that runs the epochs
(`openpipe_art_trainer`).

A killed run repeats its last train call with the same idempotency key and the same groups, and gets the same job.
"""

import asyncio
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import art
from art.finetune import curriculum
from art.finetune.agent import reason_of
from art.finetune.curriculum import Chosen
from art.finetune.errors import FinetuneError
from art.finetune.history import EpochRow, ValidationRow, validation_row
from art.finetune.interfaces import (
    Trainer,
    TrainerAdapter,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
)
from art.gather import is_informative

MEMORY_ADVICE = "start the server with a lower --max-tokens-per-micro-batch or --engine-arg gpu_memory_utilization, or sample shorter rollouts"


class ArtTrainerAdapter(TrainerAdapter):
    """Trains on an art-server, one step for each call."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._calls: dict[str, asyncio.Task[art.TrainResult]] = {}

    async def is_healthy(self) -> bool:
        try:
            await self.context.model.get_step()
        except art.ArtError:
            return False
        return True

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        run, meta = self.context, trajectories.meta
        key = f"{trajectories.run_id}-{meta['epoch']}-{meta['num_failed_jobs']}"
        if run.config.adapter.backend.delete_old_checkpoints:
            await run.model.delete_checkpoints()
        call = run.model.train(
            trajectories.trajectories,
            run.train_config,
            idempotency_key=key,
            expected_step=meta["step"],
        )
        self._calls[key] = asyncio.create_task(call)
        return TrainingJobRef(trajectories.run_id, metadata={"key": key})

    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        call = self._calls[ref.metadata["key"]]
        if not call.done():
            return TrainingJobStatus(ref.run_id, TrainingStatusEnum.RUNNING)
        return await self.wait_until_complete(ref)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Follows the job's stream. `poll_interval` has no use.

        Raises:
            ArtConnectionError: no server answers.
        """
        try:
            result = await self._calls[ref.metadata["key"]]
        except (art.ArtJobError, art.ArtStatusError) as error:
            text = f"{error}; {MEMORY_ADVICE}" if "memory" in str(error) else str(error)
            return TrainingJobStatus(ref.run_id, TrainingStatusEnum.FAILED, message=text)
        return TrainingJobStatus(
            ref.run_id,
            TrainingStatusEnum.COMPLETED,
            progress=100.0,
            metadata={"step": result.step, "metrics": result.metrics},
        )


class ArtTrainer(Trainer):
    """Runs the epochs: validation, rollouts, curriculum, one train call, figures."""

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        statuses: list[TrainingJobStatus] = []
        folder = self.context.folder
        for epoch in range(len(folder.epochs), num_epochs):
            if epoch % self.context.config.finetuning.validation.interval == 0:
                await self.validate(epoch)
            ref = await self.run_epoch(epoch, folder.run_id)
            if ref is None:
                message = "no group had rewards that differ"
                status = TrainingJobStatus(folder.run_id, TrainingStatusEnum.COMPLETED, message=message)
            else:
                status = await self.adapter.wait_until_complete(ref)
            if status.status is not TrainingStatusEnum.COMPLETED:
                # The server would answer the same key with the failed job.
                begun = folder.noted("begun")
                folder.note("begun", begun | {"num_failed_jobs": begun["num_failed_jobs"] + 1})
                raise FinetuneError(f"epoch {epoch + 1} was not trained: {status.message}")
            await self._finish_epoch(status)
            statuses.append(status)
        await self.validate(num_epochs)
        return statuses

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        run = self.context
        begun = run.folder.noted("begun")
        if begun is None or begun["epoch"] != epoch:  # else a killed run began the epoch
            begun = {"epoch": epoch, "step": await run.model.get_step(), "num_failed_jobs": 0}
            run.folder.note("begun", begun)
        step: int = begun["step"]
        meta: dict[str, Any] = {**begun, "rows": self._rows_of(epoch)}
        await self.builder.start_run(run_id, meta)
        sampled = await self.builder.finalize(run_id, meta)
        groups = sampled.trajectories
        rewards = [[each.reward for each in group] for group in groups]
        chosen = curriculum.choose(run.curriculum, rewards, epoch, f"{run.seed}/{epoch}")
        least = min(2, run.config.builder.num_generations)
        chosen = [each for each in chosen if len(each.trajectories) >= least]
        selected = [_part_of(groups[each.group], each) for each in chosen]
        self._epoch, self._step, self._groups = epoch, step, groups
        self._chosen = chosen if _have_signal(selected) else []
        if not self._chosen:
            return None
        return await self.adapter.submit(replace(sampled, trajectories=selected, meta=meta))

    def _rows_of(self, epoch: int) -> list[int]:
        """The places of the rows that an epoch samples."""
        run = self.context
        if not curriculum.samples_all_rows(run.curriculum, epoch):
            chosen = run.folder.epochs[curriculum.last_expansion(run.curriculum, epoch)]
            kept: list[int] = (chosen.curriculum_state or {}).get("included_groups", [])
            if kept:
                return sorted(kept)
        return list(range(len(run.rows)))

    async def _finish_epoch(self, status: TrainingJobStatus) -> None:
        """Writes the epoch into the server's history and into the folder."""
        run, groups = self.context, self._groups
        step: int = status.metadata.get("step", self._step)
        row = self._epoch_row(step)
        if row.avg_reward is not None:
            await run.model.log([], "epoch", metrics={"epoch/reward": row.avg_reward}, step=step)
        trained = {each.group for each in self._chosen}
        left_out = [group for place, group in enumerate(groups) if place not in trained and len(group)]
        if left_out:
            await run.model.log(left_out, "left_out", step=step)
        run.folder.add_epoch(row)
        figures = {**status.metadata.get("metrics", {}), "epoch": row.epoch, "epoch/reward": row.avg_reward}
        self.builder.log_progress(run.folder.run_id, figures, str(run.folder.path))
        self.log_progress(row.epoch, figures, str(run.folder.path))
        run.say(_epoch_line(row, run.config.finetuning.num_epochs, status.message))

    def _epoch_row(self, step: int) -> EpochRow:
        run, groups, epoch = self.context, self._groups, self._epoch
        rewards = [each.reward for group in groups for each in group]
        selected: list[float] = []
        for each in self._chosen:
            selected += [groups[each.group].trajectories[place].reward for place in each.trajectories]
        failures = Counter(f"{each.type}: {each.message}" for group in groups for each in group.exceptions)
        state: dict[str, Any] | None = None
        if run.curriculum.enabled:
            state = {
                "current_percentile": curriculum.percentile(run.curriculum, epoch),
                "last_expansion_epoch": curriculum.last_expansion(run.curriculum, epoch),
                "total_groups": len(run.rows),
                "included_groups": sorted(groups[each.group].metadata["row"] for each in self._chosen),
            }
        return EpochRow(
            epoch=epoch,
            avg_reward=_mean(rewards),
            min_reward=min(rewards, default=None),
            max_reward=max(rewards, default=None),
            num_trajectories=len(rewards),
            num_groups=sum(len(group) > 0 for group in groups),
            filtered_trajectories=len(selected),
            filtered_groups=len(self._chosen),
            filtered_avg_reward=_mean(selected),
            filtered_min_reward=min(selected, default=None),
            filtered_max_reward=max(selected, default=None),
            curriculum_percentile=curriculum.percentile(run.curriculum, epoch),
            curriculum_state=state,
            step=step,
            num_without_signal=sum(len(group) > 0 and not is_informative(group) for group in groups),
            num_failed=failures.total(),
            failures=dict(failures),
        )

    async def validate(self, epoch: int) -> None:
        """Evaluates the model on the validation rows before an epoch, once. A failure is a row with its reason."""
        run = self.context
        if not run.validation_rows or any(each.epoch == epoch for each in run.folder.validations):
            return
        validation = run.config.finetuning.validation

        rollout = run.validation_agent.player(f"{run.folder.run_id}-val-{epoch}", run.seed)
        try:
            found = await art.evaluate(
                run.model,
                rollout,
                run.validation_rows,
                reps=validation.reps,
                seed=run.config.finetuning.seed,
                max_exceptions=run.config.finetuning.max_exceptions,
                max_concurrent_rollouts=run.config.eval.general.max_concurrency,
                pbar_desc="validation",
            )
        except art.ArtConnectionError:
            raise
        except Exception as error:
            row = ValidationRow(epoch=epoch, step=await run.model.get_step(), error=reason_of(error))
        else:
            row = validation_row(epoch, found)
        run.folder.add_validation(row)
        run.say(f"validation before epoch {epoch + 1}: {row.error or f'reward {row.avg_reward:.4f}'}")

    async def get_metrics(self, run_id: str) -> dict[str, Any]:
        epochs = self.context.folder.epochs
        return {} if not epochs else {"epoch": epochs[-1].epoch, "avg_reward": epochs[-1].avg_reward}


def _part_of(group: art.TrajectoryGroup, chosen: Chosen) -> art.TrajectoryGroup:
    kept = [group.trajectories[place] for place in chosen.trajectories]
    return art.TrajectoryGroup(kept, exceptions=group.exceptions, metadata=group.metadata, metrics=group.metrics)


def _have_signal(groups: list[art.TrajectoryGroup]) -> bool:
    """Whether rewards differ: within a group, or between groups of one rollout each."""
    if all(len(group) == 1 for group in groups):
        return len({group.trajectories[0].reward for group in groups}) > 1
    return any(map(is_informative, groups))


def _mean(rewards: Iterable[float]) -> float | None:
    known = list(rewards)
    return statistics.fmean(known) if known else None


def _epoch_line(row: EpochRow, num_epochs: int, message: str | None) -> str:
    reward = "no reward" if row.avg_reward is None else f"reward {row.avg_reward:.4f}"
    failed = f", {row.num_failed} rollouts failed" if row.num_failed else ""
    trained = message or f"{row.filtered_trajectories} of {row.num_trajectories} trajectories trained"
    return f"epoch {row.epoch + 1}/{num_epochs}: {reward}, {trained}, step {row.step}{failed}"
