"""The loop of a run (`openpipe_art_trainer`), and its train calls (`openpipe_art_trainer_adapter`).

The loop is over batches (`batches.py`), each of which is trained as one step. Without `rows_per_step` a batch is a whole epoch.

A killed run repeats its last train call with the same idempotency key and the same groups, and gets the same job. If the server
refuses to train what an earlier process sampled, or the model has moved meanwhile, the unfinished batch is begun anew.
"""

import asyncio
import importlib
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import art
from art.finetune import curriculum, stopping
from art.finetune.agent import num_answers, num_cut_answers, reason_of, reason_of_failure, share_same
from art.finetune.batches import Batches
from art.finetune.curriculum import Chosen
from art.finetune.errors import FinetuneError, RolloutFailed
from art.finetune.interfaces import Part, Run, TrainerAdapter, TrainingJobStatus, TrajectoryBuilder, say
from art.finetune.losing import is_lost, server_lost
from art.finetune.rollouts import play_once, report_lost
from art.finetune.rows import DatasetRow
from art.finetune.run_record import (
    EpochRow,
    RolloutRecord,
    ValidationRow,
    reward_figures,
    solved_reward,
    validation_row,
)
from art.finetune.sections import Component
from art.trajectories import is_informative
from art_protocol.signal import has_signal

NO_SIGNAL = "no group had rewards that differ"
MOST_CUT = 0.5
"""If the token limit cuts more than this share of a batch's answers, the remedy is printed."""
CUT_REMEDY = (
    "the token limit cuts most answers, which then earn what their beginnings earn: raise max_tokens of the agent's requests, or "
    "the server's --max-seq-length, or ask for shorter answers"
)
SOLVED = (
    "all rewards are {reward:g}, the highest of the run: these rows seem solved, and training can stop. If an answer can earn more, use "
    "a reward that tells these answers apart, or other rows"
)


@dataclass(frozen=True, slots=True)
class Batch:
    """A sampled batch."""

    number: int
    """From 0, over all epochs."""
    step: int
    """The model's step that was sampled."""
    row_indices: list[int]
    """The rows that were sampled."""
    groups: list[art.TrajectoryGroup]
    """A group for each of these rows."""
    chosen: list[Chosen]
    """The groups that are trained."""

    @property
    def training(self) -> list[art.TrajectoryGroup]:
        """The chosen trajectories of the chosen groups."""
        return _parts_of(self.groups, self.chosen)


class ArtTrainer(Part):
    """Runs the batches. A subclass may stop early (`is_done`), and may use a batch's figures (`log_progress`)."""

    def __init__(self, config: Component, context: Run, builder: TrajectoryBuilder, adapter: TrainerAdapter) -> None:
        super().__init__(config, context)
        self.builder, self.adapter = builder, adapter
        self._has_named_remedy = self._has_named_solved = False
        self._ahead: dict[int, asyncio.Task[list[art.TrajectoryGroup]]] = {}
        """The sampling of the batch after the one that trains, by the batch's number."""

    async def run(self, num_epochs: int) -> list[TrainingJobStatus]:
        """Runs the batches that are left: sample, choose, train, write, with validations between the batches."""
        try:
            return await self._run(num_epochs)
        finally:
            await self._stop_ahead()

    async def _run(self, num_epochs: int) -> list[TrainingJobStatus]:
        run, statuses = self.context, list[TrainingJobStatus]()
        folder, validation = run.folder, run.config.finetuning.validation
        end = num_epochs * run.batches.per_epoch
        while (number := len(folder.state.epochs)) < end and not (number > 0 and self.is_done()):
            if run.batches.begins_interval(number, validation.interval):
                await self.validate(number)
            if stopping.has_stalled(folder.state.validations, validation.patience):
                say(
                    f"the last {validation.patience} validations were not better than an earlier one: the run ends"
                    + stopping.doubt(folder.state.validations)
                )
                break
            step, row_indices = await self._begin(), self._rows_of(number)
            groups = await (self._ahead.pop(number, None) or self.builder.sample(number, row_indices))
            if run.config.finetuning.sample_ahead and number + 1 < end:
                self._begin_ahead(number + 1)
            batch = Batch(number, step, row_indices, groups, self._choose(number, groups))
            try:
                result = await self._train(batch)
            except (art.ArtJobError, art.ArtStatusError, ValueError) as error:
                await self._give_up(error)
                continue
            row = await self._finish(batch, result)
            statuses.append(TrainingJobStatus(row.epoch, row.step, None if result else NO_SIGNAL))
        await self.validate(len(folder.state.epochs))
        return statuses

    def is_done(self) -> bool:
        """Whether the run ends with its newest batch, before `num_epochs`."""
        return False

    def log_progress(self, epoch: int, metrics: dict[str, Any], output_dir: str | None = None) -> None:
        """Called after each batch with the step's metrics, `epoch` and `epoch/reward`."""

    async def _begin(self) -> int:
        """The model's step that the batch samples. A killed run has begun the batch already, maybe at another step."""
        folder, step = self.context.folder, await self.context.model.get_step()
        began = folder.state.step
        if began is not None and (began == step or folder.state.is_submitted):
            return began
        number = len(folder.state.epochs)
        if began is None and number > 0 and (number in self._ahead or folder.num_known("train", number)):
            began = folder.state.epochs[-1].step  # sampled ahead, while this step was trained
        if began not in (None, step):
            await self._begin_anew(f"they were sampled for step {began}, and the model is at step {step}")
        folder.save(step=step)
        return step

    def _begin_ahead(self, number: int) -> None:
        """Begins to sample a batch, at the step that is served now."""
        if number not in self._ahead:
            sampling = self.builder.sample(number, self._rows_of(number))
            self._ahead[number] = asyncio.ensure_future(sampling)

    async def _stop_ahead(self) -> None:
        for sampling in self._ahead.values():
            sampling.cancel()
        await asyncio.gather(*self._ahead.values(), return_exceptions=True)
        self._ahead.clear()

    async def _begin_anew(self, reason: str) -> None:
        await self._stop_ahead()
        num_rollouts = self.context.folder.forget_batch()
        say(
            f"{self._unfinished} is begun anew, and {num_rollouts} finished rollouts of an earlier start are given up: {reason}"
        )

    @property
    def _unfinished(self) -> str:
        """The unfinished batch in words."""
        return self.context.batches.title(len(self.context.folder.state.epochs))

    def _rows_of(self, number: int) -> list[int]:
        """The indices of the rows that a batch samples."""
        run = self.context
        if not curriculum.samples_all_rows(run.curriculum, number):
            expansion = run.folder.state.epochs[curriculum.last_expansion(run.curriculum, number)]
            kept: list[int] = (expansion.curriculum_state or {}).get("included_groups", [])
            if kept:
                return kept
        return run.batches.rows_of(number, run.seed)

    def _choose(self, number: int, groups: list[art.TrajectoryGroup]) -> list[Chosen]:
        """The groups that are trained: the curriculum's choice, or none if no rewards differ."""
        run = self.context
        rewards = [[trajectory.reward for trajectory in group] for group in groups]
        chosen = curriculum.choose(run.curriculum, rewards, number, f"{run.seed}/{number}", run.batches)
        # A trajectory whose siblings have failed has nothing to be compared with.
        least = min(2, run.config.builder.num_generations)
        chosen = [chosen_group for chosen_group in chosen if len(chosen_group.trajectories) >= least]
        return chosen if _have_signal(_parts_of(groups, chosen)) else []

    async def _train(self, batch: Batch) -> art.TrainResult | None:
        """The step that is trained on the batch; None if the batch has nothing to train."""
        if not batch.chosen:
            return None
        # Before the call: the next start of a killed run then repeats it, even if the model has moved (`_begin`).
        self.context.folder.save(is_submitted=True)
        # Loads matplotlib for the plot, which takes half a second, while this process waits for the job.
        threading.Thread(target=importlib.import_module, args=("art.finetune.plot",)).start()
        return await self.adapter.train(batch.training, batch.number)

    async def _give_up(self, error: Exception) -> None:
        """Forgets the batch if its rollouts are of an earlier start, so that the batch is begun anew.

        Raises:
            FinetuneError: this process sampled the rollouts, or the error passes by waiting.
        """
        folder = self.context.folder
        # To a call with the same key the server would answer with the failed job. The next call has another key.
        folder.save(num_failed_jobs=folder.state.num_failed_jobs + 1, is_submitted=False)
        is_of_this_process = folder.num_known("train", len(folder.state.epochs)) == 0
        if is_of_this_process or (isinstance(error, art.ArtStatusError) and error.retryable):
            raise FinetuneError(f"{self._unfinished} was not trained: {error}") from error
        await self._begin_anew(str(error))

    async def _finish(self, batch: Batch, result: art.TrainResult | None) -> EpochRow:
        """Writes the batch into the server's history and into the folder. After a kill in between, the calls are repeated without
        harm: a step has one value of each metric, and one file of rollouts for each split."""
        run = self.context
        row = _batch_row(run, batch, result)
        if row.avg_reward is not None:
            figures = {"epoch/reward": row.avg_reward, "epoch/cut": row.share_cut}
            await run.model.log([], "epoch", metrics=figures, step=row.step)
        chosen = {chosen_group.group for chosen_group in batch.chosen}
        left_out = [group for index, group in enumerate(batch.groups) if index not in chosen and len(group) > 0]
        if left_out:
            await run.model.log(left_out, "left_out", step=row.step)
        ended = {"step": None, "is_submitted": False, "num_failed_jobs": 0}
        run.folder.save(epochs=[*run.folder.state.epochs, row], **ended)
        metrics = result.metrics if result else {}
        figures = {**metrics, "epoch": row.epoch, "epoch/reward": row.avg_reward}
        self.log_progress(row.epoch, figures, str(run.folder.path))
        say(_batch_line(run.batches, row, run.config.finetuning.num_epochs, result))
        if hint := run.agent.reward.take_hint([trajectory.reward for group in batch.groups for trajectory in group]):
            say(hint)
        solved = solved_reward(run.folder.state.epochs)
        if solved is not None and not self._has_named_solved:
            self._has_named_solved = True
            say(SOLVED.format(reward=solved))
        if row.share_cut > MOST_CUT and not self._has_named_remedy:
            self._has_named_remedy = True
            say(CUT_REMEDY)
        return row

    async def validate(self, number: int) -> None:
        """Evaluates the model once on the validation rows before a batch. A failed validation becomes a row with the reason."""
        run = self.context
        if not run.validation_rows or any(validation.number == number for validation in run.folder.state.validations):
            return
        position = run.batches.position(number)

        async def kept(
            model: art.TrainableModel,
            row: DatasetRow,
            repetition: int,
            session: str,
            play: Callable[[], Awaitable[art.Trajectory]],
        ) -> art.Trajectory:
            step = model.get_inference_name()
            name = RolloutRecord(
                **position, row=row.id, generation=repetition, session=session, split="val", model=step
            )
            trajectory, _ = await play_once(run, model, name, play)
            return trajectory

        try:
            evaluation = await art.evaluate(
                run.model,
                run.validation_agent.player(f"{run.folder.state.run_id}-val-{number}", run.seed, kept),
                run.validation_rows,
                reps=run.config.finetuning.validation.reps,
                seed=run.config.finetuning.seed,
                max_exceptions=run.config.finetuning.max_exceptions,
                max_concurrent_rollouts=run.config.eval.general.max_concurrency,
                pbar_desc="validation",
            )
        # `runs.connected` ends the run with NoServer.
        except art.ArtConnectionError:
            raise
        except Exception as error:
            if await is_lost(run.model):
                run.folder.forget_failed_rollouts()
                raise server_lost(run.model, error) from error
            row = ValidationRow(**position, step=await run.model.get_step(), error=reason_of(error))
        else:
            trajectories = [trajectory for group in evaluation.groups for trajectory in group]
            row = validation_row({**position, "share_same": share_same(trajectories)}, evaluation)
        report_lost(run)
        run.folder.save(validations=[*run.folder.state.validations, row])
        say(_validation_line(run, row))
        if hint := run.validation_agent.reward.take_hint([row.min_reward, row.max_reward]):
            say(hint)


class ArtTrainerAdapter(Part):
    """Trains on an art-server, one step for each call."""

    async def train(self, groups: list[art.TrajectoryGroup], number: int) -> art.TrainResult:
        run, state = self.context, self.context.folder.state
        if run.config.adapter.backend.delete_old_checkpoints:
            await run.model.delete_checkpoints()
        return await run.model.train(
            groups,
            run.train_config,
            idempotency_key=f"{state.run_id}-{number}-{state.num_failed_jobs}",
            expected_step=state.step,
        )


def _batch_row(run: Run, batch: Batch, result: art.TrainResult | None) -> EpochRow:
    groups, batches = batch.groups, run.batches
    rewards = [trajectory.reward for group in groups for trajectory in group]
    trained = [group for group in batch.training if _trains(run.train_config, group)]
    trained_rewards = [trajectory.reward for group in trained for trajectory in group]
    num_trajectories, num_groups = len(trained_rewards), len(trained)
    if result and result.report.num_trajectories:  # the server also leaves out trajectories without a trained answer
        num_trajectories, num_groups = result.report.num_trajectories_trained, result.report.num_groups_trained
    failures = Counter(reason_of_failure(failure) for group in groups for failure in group.exceptions)
    percentile = curriculum.percentile(run.curriculum, batch.number, batches)
    state: dict[str, Any] = {
        "current_percentile": percentile,
        "last_expansion_epoch": batches.epoch_of(curriculum.last_expansion(run.curriculum, batch.number, batches)),
        "total_groups": len(run.rows),
        "included_groups": sorted(batch.row_indices[chosen_group.group] for chosen_group in batch.chosen),
    }
    return EpochRow(
        **batches.position(batch.number),
        run_id=run.folder.state.run_id,
        **reward_figures(rewards),
        num_trajectories=len(rewards),
        num_groups=sum(1 for group in groups if len(group) > 0),
        filtered_trajectories=num_trajectories,
        filtered_groups=num_groups,
        **reward_figures(trained_rewards, "filtered_"),
        curriculum_percentile=percentile,
        curriculum_state=state if run.curriculum.enabled else None,
        step=result.step if result else batch.step,
        num_without_signal=sum(1 for group in groups if len(group) > 0 and not is_informative(group)),
        num_failed=failures.total(),
        num_answers=sum(num_answers(trajectory) for group in groups for trajectory in group),
        num_cut=sum(num_cut_answers(trajectory) for group in groups for trajectory in group),
        share_same=share_same([trajectory for group in groups for trajectory in group]),
        failures=dict(failures),
    )


def _parts_of(groups: list[art.TrajectoryGroup], chosen: list[Chosen]) -> list[art.TrajectoryGroup]:
    """The chosen trajectories of the chosen groups. Failures keep only their reasons, which a continued run knows too: a train call
    with the same key has to have the same bytes."""
    parts: list[art.TrajectoryGroup] = []
    for chosen_group in chosen:
        group = groups[chosen_group.group]
        kept = [group.trajectories[index] for index in chosen_group.trajectories]
        failures = [RolloutFailed(reason_of_failure(failure)) for failure in group.exceptions]
        parts.append(art.TrajectoryGroup(kept, exceptions=failures, metadata=group.metadata, metrics=group.metrics))
    return parts


def _trains(config: art.TrainConfig, group: art.TrajectoryGroup) -> bool:
    """Whether the loss has a term for a group, in an epoch with signal. Source: `art_server/shared/advantages.py`."""
    has_other_terms = (config.beta > 0 and config.kl_in == "loss") or config.entropy_bonus > 0
    if has_other_terms or is_informative(group):
        return True
    if config.baseline in ("group_mean", "leave_one_out"):
        return False
    if config.baseline == "similar_prompts" or config.scaling == "batch_std":
        return True
    return has_signal([0.0, *(trajectory.reward for trajectory in group)])


def _have_signal(groups: list[art.TrajectoryGroup]) -> bool:
    """Whether rewards differ: within a group, or between groups of one rollout each."""
    if all(len(group) == 1 for group in groups):
        return len({group.trajectories[0].reward for group in groups}) > 1
    return any(map(is_informative, groups))


def _validation_line(run: Run, row: ValidationRow) -> str:
    num_rows, reps = len(run.validation_rows), run.config.finetuning.validation.reps
    rows = "1 held-out row" if num_rows == 1 else f"{num_rows} held-out rows"
    each_row = f", {reps} rollouts of each" if reps > 1 else ""
    when = f"after {run.batches.end(row.number - 1)}" if row.number else "before epoch 1"
    return f"validation ({rows}{each_row}) {when}: {row.error or f'reward {row.estimate}'}"


def _batch_line(batches: Batches, row: EpochRow, num_epochs: int, result: art.TrainResult | None) -> str:
    trained, unnamed = NO_SIGNAL, ""
    if result:
        trained = f"{row.filtered_trajectories} of {row.num_trajectories} trajectories trained"
        if num_unnamed := result.report.num_unnamed_requests:
            unnamed = f", {num_unnamed} requests came without their rollout: docs/finetune.md, Workflows"
    reward = "no reward" if row.avg_reward is None else f"reward {row.avg_reward:.4f}"
    failed = f", {row.num_failed} rollouts failed" if row.num_failed else ""
    cut = f", the token limit cut {row.num_cut} of {row.num_answers} answers" if row.num_cut else ""
    title = batches.title(row.number, num_epochs)
    return f"{title}: {reward}, {trained}, step {row.step}{failed}{cut}{unnamed}"
