"""The rollouts of a batch (`openpipe_art_traj_builder`). The output folder keeps the session and the score of each finished
rollout; the server has the conversations."""

import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import art
from art.contained import contained
from art.finetune.agent import num_answers, seed_of, text_of
from art.finetune.errors import RolloutFailed
from art.finetune.interfaces import Part, Run, say
from art.finetune.run_record import RolloutRecord
from art.finetune.scoring import finite

NAME_FIELDS = {"epoch", "batch", "row", "generation", "session"}
"""The fields that a trajectory's metadata and its `RolloutRecord` have in common."""


class ArtTrajectoryBuilder(Part):
    """Samples `num_generations` rollouts of each row, under one limit over all groups. The rollouts that a killed run has
    finished are not sampled again."""

    async def compute_reward(self, trajectory: art.Trajectory, meta: dict[str, Any]) -> float:
        """The reward of a scored trajectory, for subclasses. `meta` has `row` and `output`."""
        return trajectory.reward

    async def sample(self, number: int, row_indices: Sequence[int]) -> list[art.TrajectoryGroup]:
        run, groups = self.context, list[art.TrajectoryGroup]()
        generations = range(run.config.builder.num_generations)
        for row_index in row_indices:
            rollouts = [self._rollout(number, row_index, generation) for generation in generations]
            groups.append(art.TrajectoryGroup(rollouts, metadata={"row": run.rows[row_index].id}))
        try:
            sampled = await art.gather_trajectory_groups(
                groups,
                pbar_desc=run.batches.title(number),
                max_exceptions=run.config.finetuning.max_exceptions,
                max_concurrent_rollouts=run.config.eval.general.max_concurrency,
                after_each=self._compare if run.agent.reward.is_of_groups else None,
            )
        except Exception:
            run.folder.forget_failed_rollouts()  # else the failed rollouts would end the next process too
            raise
        report_lost(run)
        return sampled

    async def _rollout(self, number: int, row_index: int, generation: int) -> art.Trajectory:
        run, row = self.context, self.context.rows[row_index]
        session = f"{run.folder.state.run_id}-{number}-{row_index}-{generation}-{uuid.uuid4().hex[:8]}"

        async def play() -> art.Trajectory:
            seed = seed_of(run.seed, number, row.id, generation)
            trajectory, output = await run.agent.play(run.model, row, session, seed)
            reward = await self.compute_reward(trajectory, {"row": row, "output": output})
            trajectory.reward = finite("compute_reward", reward)
            return trajectory

        position = run.batches.position(number)
        name = RolloutRecord(**position, row=row.id, generation=generation, session=session)
        trajectory, known = await play_once(run, run.model, name, play)
        # The same order of keys for a new and for a restored rollout: a repeated train call has to have the same bytes.
        trajectory.metadata = {**known.model_dump(include=NAME_FIELDS), **trajectory.metadata}
        return trajectory

    async def _compare(self, group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        """A group with the scores of its comparison. The folder keeps these scores too."""
        if all("ruler_score" in trajectory.metrics for trajectory in group):
            return group
        scored = await self.context.agent.reward.score_group(group)
        for trajectory in scored:
            fields = {field: trajectory.metadata[field] for field in NAME_FIELDS & trajectory.metadata.keys()}
            name = RolloutRecord.model_validate(fields)
            keep(self.context, name, trajectory)
        return scored


async def play_once(
    run: Run, model: art.TrainableModel, name: RolloutRecord, play: Callable[[], Awaitable[art.Trajectory]]
) -> tuple[art.Trajectory, RolloutRecord]:
    """The trajectory of a rollout, and its row. If an earlier process has finished the rollout, the trajectory is restored, else
    the rollout is played and kept. A finished rollout is played anew if the server has lost some of its answers, or if the
    rollout was a validation of another step.

    Raises:
        RolloutFailed: the rollout failed in the earlier process.
        Exception: as `play` does.
    """
    known = run.folder.rollouts.get((name.split, name.number, name.row, name.generation))
    if known is not None:
        if known.model == name.model:
            trajectory = await restore(model, known)
            if num_answers(trajectory) >= known.num_answers:
                return trajectory, known
        run.folder.num_lost += 1
    try:
        with contained("the rollout"):
            trajectory = await play()
    except Exception as error:  # a cancelled rollout is sampled again
        run.folder.add_rollout(name.model_copy(update={"error": text_of(error)}))
        raise
    keep(run, name, trajectory)
    return trajectory, name


def report_lost(run: Run) -> None:
    """Prints how many finished rollouts were sampled anew since the last call."""
    if run.folder.num_lost:
        say(
            f"{run.folder.num_lost} finished rollouts were sampled anew: the server no longer has their answers, or the model "
            "that they evaluated is at another step"
        )
    run.folder.num_lost = 0


def keep(run: Run, name: RolloutRecord, trajectory: art.Trajectory) -> None:
    """Adds a finished rollout with its score to the folder."""
    score: dict[str, Any] = trajectory.model_dump(include={"reward", "metrics", "turn_rewards"})
    run.folder.add_rollout(name.model_copy(update=score | {"num_answers": num_answers(trajectory)}))


async def restore(model: art.TrainableModel, known: RolloutRecord) -> art.Trajectory:
    """The trajectory of a finished rollout, with the answers that the server still has."""
    if known.error is not None:
        raise RolloutFailed(known.error)
    trajectory = await art.rollout(model, known.session).trajectory(known.reward or 0.0, metadata={"row": known.row})
    trajectory.metrics, trajectory.turn_rewards = dict(known.metrics), known.turn_rewards
    return trajectory
