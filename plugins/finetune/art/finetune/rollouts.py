"""The rollouts of an epoch (`openpipe_art_traj_builder`). Finished ones are kept in the output folder as session and score: the
server has their conversations."""

import asyncio
import uuid
from typing import Any

import art
from art.finetune.agent import RolloutFailed, reason_of, seed_of
from art.finetune.history import RolloutRow
from art.finetune.interfaces import TrajectoryBuilder, TrajectoryCollection


class ArtTrajectoryBuilder(TrajectoryBuilder):
    """Samples `num_generations` rollouts of each row, under one limit over all groups. What a killed run finished is not
    sampled again."""

    _task: asyncio.Task[list[art.TrajectoryGroup]]
    _epoch: int

    async def start_run(self, run_id: str, meta: dict[str, Any]) -> None:
        self._epoch = meta["epoch"]
        self._task = asyncio.create_task(self._sample(meta["epoch"], meta["rows"]))

    async def finalize(self, run_id: str, meta: dict[str, Any]) -> TrajectoryCollection:
        return TrajectoryCollection(await self._task, run_id, meta)

    async def _sample(self, epoch: int, places: list[int]) -> list[art.TrajectoryGroup]:
        run, generations = self.context, self.context.config.builder.num_generations
        retries = run.folder.noted("failed_epoch") == epoch
        known: dict[tuple[str, int], RolloutRow] = {}
        for each in run.folder.rollouts(epoch):
            if each.error is None or not retries:
                known[each.row, each.generation] = each
        groups: list[art.TrajectoryGroup] = []
        for place in places:
            row = run.rows[place]
            coroutines = [self._rollout(epoch, place, each, known.get((row.id, each))) for each in range(generations)]
            groups.append(art.TrajectoryGroup(coroutines, metadata={"row": place, "id": row.id}))
        try:
            return await art.gather_trajectory_groups(
                groups,
                pbar_desc=f"epoch {epoch + 1}",
                max_exceptions=run.config.finetuning.max_exceptions,
                max_concurrent_rollouts=run.config.eval.general.max_concurrency,
                after_each=self._compare if run.agent.reward.is_of_groups else None,
            )
        except Exception:
            run.folder.note("failed_epoch", epoch)  # the next start tries its failures again
            raise

    async def _rollout(self, epoch: int, place: int, generation: int, known: RolloutRow | None) -> art.Trajectory:
        run = self.context
        if known is not None:
            return await self._restore(known)
        row, session = run.rows[place], f"{run.folder.run_id}-{epoch}-{place}-{generation}-{uuid.uuid4().hex[:8]}"
        seed = seed_of(run.seed, epoch, row.id, generation)
        about: dict[str, Any] = {"epoch": epoch, "row": row.id, "generation": generation, "session": session}
        try:
            trajectory, output = await run.agent.play(run.model, row, session, seed)
            trajectory.reward = await self.compute_reward(trajectory, {"row": row, "output": output})
        except Exception as error:  # a cancelled rollout is sampled again
            run.folder.add_rollout(RolloutRow(**about, error=reason_of(error)))
            raise
        run.folder.add_rollout(RolloutRow(**about, **_score_of(trajectory)))
        trajectory.metadata |= {"session": session, "generation": generation}
        return trajectory

    async def _restore(self, known: RolloutRow) -> art.Trajectory:
        if known.error is not None:
            raise RolloutFailed(known.error)
        run = self.context
        trajectory = await art.rollout(run.model, known.session).trajectory(
            known.reward or 0.0, metrics=dict(known.metrics)
        )
        trajectory.turn_rewards = known.turn_rewards
        trajectory.metadata |= {"id": known.row, "session": known.session, "generation": known.generation}
        return trajectory

    async def _compare(self, group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        """A group with the scores of its comparison, which are kept too."""
        run = self.context
        if all("ruler_score" in each.metrics for each in group):
            return group
        scored = await run.agent.reward.score_group(group)
        for each in scored:
            known = {"row": each.metadata["id"], **{name: each.metadata[name] for name in ("session", "generation")}}
            run.folder.add_rollout(RolloutRow(epoch=self._epoch, **known, **_score_of(each)))
        return scored


def _score_of(trajectory: art.Trajectory) -> dict[str, Any]:
    return {"reward": trajectory.reward, "metrics": dict(trajectory.metrics), "turn_rewards": trajectory.turn_rewards}
