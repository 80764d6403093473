"""The rollouts of an epoch (`openpipe_art_traj_builder`). Finished ones are kept in the output folder as session and score: the
server has their conversations."""

import asyncio
import uuid
from typing import Any

import art
from art.finetune.agent import RolloutFailed, reason_of, seed_of
from art.finetune.history import RolloutRow
from art.finetune.interfaces import TrajectoryBuilder, TrajectoryCollection

NAME_FIELDS = {"epoch", "row", "generation", "session"}
"""What the metadata of a trajectory and its `RolloutRow` have in common."""


class ArtTrajectoryBuilder(TrajectoryBuilder):
    """Samples `num_generations` rollouts of each row, under one limit over all groups. What a killed run finished is not
    sampled again."""

    _sampling: asyncio.Task[list[art.TrajectoryGroup]]

    async def start_run(self, run_id: str, meta: dict[str, Any]) -> None:
        self._sampling = asyncio.create_task(self._sample(meta["epoch"], meta["rows"]))

    async def finalize(self, run_id: str, meta: dict[str, Any]) -> TrajectoryCollection:
        return TrajectoryCollection(await self._sampling, run_id, meta)

    async def _sample(self, epoch: int, places: list[int]) -> list[art.TrajectoryGroup]:
        run, groups = self.context, list[art.TrajectoryGroup]()
        for place in places:
            rollouts = [self._rollout(epoch, place, each) for each in range(run.config.builder.num_generations)]
            groups.append(art.TrajectoryGroup(rollouts, metadata={"row": run.rows[place].id}))
        try:
            return await art.gather_trajectory_groups(
                groups,
                pbar_desc=f"epoch {epoch + 1}",
                max_exceptions=run.config.finetuning.max_exceptions,
                max_concurrent_rollouts=run.config.eval.general.max_concurrency,
                after_each=self._compare if run.agent.reward.is_of_groups else None,
            )
        except Exception:
            run.folder.forget_failed_rollouts()  # else they would end the next process too
            raise

    async def _rollout(self, epoch: int, place: int, generation: int) -> art.Trajectory:
        run, row = self.context, self.context.rows[place]
        known = run.folder.rollouts.get((row.id, generation))
        if known is not None and known.epoch == epoch:
            return await self._restore(known)
        session = f"{run.folder.state.run_id}-{epoch}-{place}-{generation}-{uuid.uuid4().hex[:8]}"
        name: dict[str, Any] = {"epoch": epoch, "row": row.id, "generation": generation, "session": session}
        try:
            seed = seed_of(run.seed, epoch, row.id, generation)
            trajectory, output = await run.agent.play(run.model, row, session, seed)
            trajectory.reward = await self.compute_reward(trajectory, {"row": row, "output": output})
        except Exception as error:  # a cancelled rollout is sampled again
            run.folder.add_rollout(RolloutRow(**name, error=reason_of(error)))
            raise
        trajectory.metadata = {**name, **trajectory.metadata}  # in the order of a restored one
        self._keep(trajectory)
        return trajectory

    def _keep(self, trajectory: art.Trajectory) -> None:
        name: dict[str, Any] = {field: trajectory.metadata[field] for field in NAME_FIELDS}
        score: dict[str, Any] = trajectory.model_dump(include={"reward", "metrics", "turn_rewards"})
        self.context.folder.add_rollout(RolloutRow(**name, **score))

    async def _restore(self, known: RolloutRow) -> art.Trajectory:
        if known.error is not None:
            raise RolloutFailed(known.error)
        rollout = art.rollout(self.context.model, known.session)
        trajectory = await rollout.trajectory(known.reward or 0.0, metadata=known.model_dump(include=NAME_FIELDS))
        trajectory.metrics, trajectory.turn_rewards = dict(known.metrics), known.turn_rewards
        return trajectory

    async def _compare(self, group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        """A group with the scores of its comparison, which are kept too."""
        if all("ruler_score" in each.metrics for each in group):
            return group
        scored = await self.context.agent.reward.score_group(group)
        for each in scored:
            self._keep(each)
        return scored
