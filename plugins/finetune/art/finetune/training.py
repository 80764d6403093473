"""Training: the adapter that calls `model.train` (`openpipe_art_trainer_adapter`), and the trainer that runs the epochs
(`openpipe_art_trainer`).

A killed run repeats its last train call with the same idempotency key and the same groups, and gets the same job. If the server
refuses to train what an earlier process sampled, or the model has moved meanwhile, the unfinished epoch is begun anew.
"""

import asyncio
import importlib
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import art
from art.core.gather import is_informative
from art.finetune import curriculum
from art.finetune.agent import num_cut_answers, reason_of, reason_of_failure
from art.finetune.curriculum import Chosen
from art.finetune.errors import FinetuneError, RolloutFailed
from art.finetune.history import EpochRow, RolloutRow, ValidationRow, reward_figures, validation_row
from art.finetune.interfaces import (
    Trainer,
    TrainerAdapter,
    TrainingJobRef,
    TrainingJobStatus,
    TrainingStatusEnum,
    TrajectoryCollection,
    say,
)
from art.finetune.losing import is_lost, server_lost
from art.finetune.rollouts import play_once, report_lost
from art.finetune.rows import Row
from art_protocol.signal import has_signal


class ArtTrainerAdapter(TrainerAdapter):
    """Trains on an art-server, one step for each call."""

    _training: asyncio.Task[art.TrainResult]

    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef:
        run, meta = self.context, trajectories.meta
        if run.config.adapter.backend.delete_old_checkpoints:
            await run.model.delete_checkpoints()
        call = run.model.train(
            trajectories.trajectories,
            run.train_config,
            idempotency_key=f"{trajectories.run_id}-{meta['epoch']}-{run.folder.state.num_failed_jobs}",
            expected_step=meta["step"],
        )
        self._training = asyncio.create_task(call)
        return TrainingJobRef(trajectories.run_id)

    async def wait_until_complete(self, ref: TrainingJobRef, poll_interval: float = 10.0) -> TrainingJobStatus:
        """Follows the job's stream. `poll_interval` is not used.

        Raises:
            ArtConnectionError: no server answers.
        """
        # Loads matplotlib for the plot, which takes half a second, while this process waits for the job.
        threading.Thread(target=importlib.import_module, args=("art.finetune.plot",)).start()
        try:
            result = await self._training
        except (art.ArtJobError, art.ArtStatusError, ValueError) as error:
            passes = isinstance(error, art.ArtStatusError) and error.retryable
            return TrainingJobStatus(
                ref.run_id, TrainingStatusEnum.FAILED, message=str(error), metadata={"passes": passes}
            )
        num_unnamed = result.report.num_unnamed_requests
        metadata: dict[str, Any] = {"step": result.step, "metrics": result.metrics, "num_unnamed_requests": num_unnamed}
        if result.report.num_trajectories:
            metadata["num_trained"] = (result.report.num_trajectories_trained, result.report.num_groups_trained)
        return TrainingJobStatus(ref.run_id, TrainingStatusEnum.COMPLETED, progress=100.0, metadata=metadata)


class ArtTrainer(Trainer):
    """Runs the epochs: validation, rollouts, curriculum, one train call, figures."""

    _sampled: TrajectoryCollection
    _chosen: list[Chosen]

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        statuses: list[TrainingJobStatus] = []
        folder = self.context.folder
        while (epoch := len(folder.state.epochs)) < num_epochs and not (epoch and self.is_done()):
            if epoch % self.context.config.finetuning.validation.interval == 0:
                await self.validate(epoch)
            ref = await self.run_epoch(epoch, folder.state.run_id)
            if ref is None:
                message = "no group had rewards that differ"
                status = TrainingJobStatus(folder.state.run_id, TrainingStatusEnum.COMPLETED, message=message)
            else:
                status = await self.adapter.wait_until_complete(ref)
            if status.status is TrainingStatusEnum.COMPLETED:
                await self._finish_epoch(status)
                statuses.append(status)
                continue
            # To a call with the same key the server would answer with the failed job. The next call has another key.
            folder.save(num_failed_jobs=folder.state.num_failed_jobs + 1, is_submitted=False)
            is_of_this_process = not any(row.split == "train" for row in folder.rollouts.values())
            if is_of_this_process or status.metadata.get("passes"):
                raise FinetuneError(f"epoch {epoch + 1} was not trained: {status.message}")
            self._begin_anew(status.message)
        await self.validate(len(folder.state.epochs))
        return statuses

    def is_done(self) -> bool:
        """Whether the run ends with its newest epoch, before `num_epochs`: a subclass may stop early."""
        return False

    def _begin_anew(self, reason: str | None) -> None:
        folder = self.context.folder
        num_rollouts = folder.forget_epoch()
        say(
            f"epoch {len(folder.state.epochs) + 1} is begun anew, and {num_rollouts} finished rollouts of an earlier start are "
            f"given up: {reason}"
        )

    async def run_epoch(self, epoch: int, run_id: str) -> TrainingJobRef | None:
        run = self.context
        began, step = run.folder.state.step, await run.model.get_step()
        if began not in (None, step) and not run.folder.state.is_submitted:
            self._begin_anew(f"they were sampled at step {began}, and the model is at step {step}")
        if run.folder.state.step is None:  # else a killed run began the epoch
            run.folder.save(step=step)
        meta: dict[str, Any] = {"epoch": epoch, "rows": self._rows_of(epoch), "step": run.folder.state.step}
        await self.builder.start_run(run_id, meta)
        self._sampled = sampled = replace(await self.builder.finalize(run_id, meta), meta=meta)
        rewards = [[trajectory.reward for trajectory in group] for group in sampled.trajectories]
        chosen = curriculum.choose(run.curriculum, rewards, epoch, f"{run.seed}/{epoch}")
        least = min(2, run.config.builder.num_generations)
        chosen = [chosen_group for chosen_group in chosen if len(chosen_group.trajectories) >= least]
        selected = [_part_of(sampled.trajectories[chosen_group.group], chosen_group) for chosen_group in chosen]
        self._chosen = chosen if _have_signal(selected) else []
        if not self._chosen:
            return None
        run.folder.save(is_submitted=True)
        return await self.adapter.submit(replace(sampled, trajectories=selected))

    def _rows_of(self, epoch: int) -> list[int]:
        """The indices of the rows that an epoch samples."""
        run = self.context
        if not curriculum.samples_all_rows(run.curriculum, epoch):
            expansion = run.folder.state.epochs[curriculum.last_expansion(run.curriculum, epoch)]
            kept: list[int] = (expansion.curriculum_state or {}).get("included_groups", [])
            if kept:
                return kept
        return list(range(len(run.rows)))

    async def _finish_epoch(self, status: TrainingJobStatus) -> None:
        """Writes the epoch into the server's history and into the folder. After a kill in between, the calls are repeated without
        harm: a step has one value of each metric, and one file of rollouts for each split."""
        run = self.context
        row = self._epoch_row(status)
        if row.avg_reward is not None:
            await run.model.log([], "epoch", metrics={"epoch/reward": row.avg_reward}, step=row.step)
        trained = {chosen_group.group for chosen_group in self._chosen}
        others = [group for index, group in enumerate(self._sampled.trajectories) if index not in trained]
        if left_out := [group for group in others if len(group)]:
            await run.model.log(left_out, "left_out", step=row.step)
        ended = {"step": None, "is_submitted": False, "num_failed_jobs": 0}
        run.folder.save(epochs=[*run.folder.state.epochs, row], **ended)
        figures = {**status.metadata.get("metrics", {}), "epoch": row.epoch, "epoch/reward": row.avg_reward}
        self.log_progress(row.epoch, figures, str(run.folder.path))
        num_unnamed = status.metadata.get("num_unnamed_requests", 0)
        say(_epoch_line(row, run.config.finetuning.num_epochs, status.message, num_unnamed))

    def _epoch_row(self, status: TrainingJobStatus) -> EpochRow:
        run, groups, meta = self.context, self._sampled.trajectories, self._sampled.meta
        rewards = [trajectory.reward for group in groups for trajectory in group]
        selected = [_part_of(groups[chosen_group.group], chosen_group) for chosen_group in self._chosen]
        trained = [group for group in selected if _trains(run.train_config, group)]
        trained_rewards = [trajectory.reward for group in trained for trajectory in group]
        # The server also leaves out trajectories without an answer that can be trained.
        counts = status.metadata.get("num_trained", (len(trained_rewards), len(trained)))
        failures = Counter(reason_of_failure(failure) for group in groups for failure in group.exceptions)
        percentile = curriculum.percentile(run.curriculum, meta["epoch"])
        state: dict[str, Any] = {
            "current_percentile": percentile,
            "last_expansion_epoch": curriculum.last_expansion(run.curriculum, meta["epoch"]),
            "total_groups": len(run.rows),
            "included_groups": sorted(meta["rows"][chosen_group.group] for chosen_group in self._chosen),
        }
        return EpochRow(
            epoch=meta["epoch"],
            run_id=self._sampled.run_id,
            **reward_figures(rewards),
            num_trajectories=len(rewards),
            num_groups=sum(1 for group in groups if len(group) > 0),
            filtered_trajectories=counts[0],
            filtered_groups=counts[1],
            **reward_figures(trained_rewards, "filtered_"),
            curriculum_percentile=percentile,
            curriculum_state=state if run.curriculum.enabled else None,
            step=status.metadata.get("step", meta["step"]),
            num_without_signal=sum(1 for group in groups if len(group) > 0 and not is_informative(group)),
            num_failed=failures.total(),
            num_cut=sum(num_cut_answers(trajectory) for group in groups for trajectory in group),
            failures=dict(failures),
        )

    async def validate(self, epoch: int) -> None:
        """Evaluates the model once on the validation rows before an epoch. A failed validation becomes a row with the reason."""
        run = self.context
        if not run.validation_rows or any(validation.epoch == epoch for validation in run.folder.state.validations):
            return

        async def kept(
            model: art.TrainableModel,
            row: Row,
            number: int,
            session: str,
            play: Callable[[], Awaitable[art.Trajectory]],
        ) -> art.Trajectory:
            name = RolloutRow(
                epoch=epoch,
                row=row.id,
                generation=number,
                session=session,
                split="val",
                model=model.get_inference_name(),
            )
            trajectory, _ = await play_once(run, model, name, play)
            return trajectory

        try:
            evaluation = await art.evaluate(
                run.model,
                run.validation_agent.player(f"{run.folder.state.run_id}-val-{epoch}", run.seed, kept),
                run.validation_rows,
                reps=run.config.finetuning.validation.reps,
                seed=run.config.finetuning.seed,
                max_exceptions=run.config.finetuning.max_exceptions,
                max_concurrent_rollouts=run.config.eval.general.max_concurrency,
                pbar_desc="validation",
            )
        except art.ArtConnectionError:
            raise
        except Exception as error:
            if await is_lost(run.model):
                run.folder.forget_failed_rollouts()
                raise server_lost(run.model, error) from error
            row = ValidationRow(epoch=epoch, step=await run.model.get_step(), error=reason_of(error))
        else:
            row = validation_row(epoch, evaluation)
        report_lost(run)
        run.folder.save(validations=[*run.folder.state.validations, row])
        say(f"validation before epoch {epoch + 1}: {row.error or f'reward {row.avg_reward:.4f}'}")


def _part_of(group: art.TrajectoryGroup, chosen: Chosen) -> art.TrajectoryGroup:
    """The chosen trajectories of a group. Failures keep only their reasons, which a continued run knows too: a train call with the
    same key has to have the same bytes."""
    kept = [group.trajectories[index] for index in chosen.trajectories]
    failures = [RolloutFailed(reason_of_failure(failure)) for failure in group.exceptions]
    return art.TrajectoryGroup(kept, exceptions=failures, metadata=group.metadata, metrics=group.metrics)


def _trains(config: art.TrainConfig, group: art.TrajectoryGroup) -> bool:
    """Whether the loss has a term for a group, in an epoch with signal. Source: `art_server/process/shared/advantages.py`."""
    has_other_terms = (config.beta > 0 and config.kl_in == "loss") or config.entropy_bonus > 0
    if has_other_terms or is_informative(group):
        return True
    if config.baseline != "none":
        return False
    return config.scaling == "batch_std" or has_signal([0.0, *(trajectory.reward for trajectory in group)])


def _have_signal(groups: list[art.TrajectoryGroup]) -> bool:
    """Whether rewards differ: within a group, or between groups of one rollout each."""
    if all(len(group) == 1 for group in groups):
        return len({group.trajectories[0].reward for group in groups}) > 1
    return any(map(is_informative, groups))


def _epoch_line(row: EpochRow, num_epochs: int, message: str | None, num_unnamed: int) -> str:
    reward = "no reward" if row.avg_reward is None else f"reward {row.avg_reward:.4f}"
    failed = f", {row.num_failed} rollouts failed" if row.num_failed else ""
    unnamed = f", {num_unnamed} requests came without their rollout: docs/finetune.md, Workflows" if num_unnamed else ""
    trained = message or f"{row.filtered_trajectories} of {row.num_trajectories} trajectories trained"
    cut = f", the token limit cut {row.num_cut} answers" if row.num_cut else ""
    return f"epoch {row.epoch + 1}/{num_epochs}: {reward}, {trained}, step {row.step}{failed}{cut}{unnamed}"
