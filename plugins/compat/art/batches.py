"""ART's asynchronous training: batches of groups as they complete, while later groups are sampled already.

    async for batch in art.trajectory_group_batches(groups, batch_size=8):
        await model.train(batch)

A group may then be some steps older than the policy that it trains (`TrainConfig(max_staleness=...)`).
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Iterable

from tqdm.auto import tqdm

from art.core.gather import close_groups, gather_trajectory_groups
from art.errors import ArtError
from art.trajectories import TrajectoryGroup


async def trajectory_group_batches(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    batch_size: int,
    max_batch_exceptions: float = 0,
    max_concurrent_batches: int = 4,
    skip_batches: int = 0,
    pbar_desc: str | None = "batches",
    pbar_total_completion_tokens: bool = False,
) -> AsyncIterator[list[TrajectoryGroup]]:
    """Batches of `batch_size` groups, in the order in which the groups complete. The last batch has the rest.

    At most `batch_size * max_concurrent_batches` groups are sampled at a time. The first `skip_batches` batches of
    groups are left out, for a program that continues. A batch tolerates `max_batch_exceptions` failed rollouts: a
    number, or a share of its rollouts if between 0 and 1.

    Raises:
        ArtError: more rollouts of a batch failed.
    """
    if batch_size < 1 or max_concurrent_batches < 1 or skip_batches < 0:
        raise ValueError("batch_size and max_concurrent_batches are at least 1, skip_batches 0")
    all_groups = list(groups)
    num_skipped = batch_size * skip_batches
    close_groups(all_groups[:num_skipped])
    waiting = all_groups[num_skipped:]
    running: set[asyncio.Task[list[TrajectoryGroup]]] = set()
    batch: list[TrajectoryGroup] = []
    bar = tqdm(desc=pbar_desc, total=len(waiting), disable=pbar_desc is None)
    try:
        while waiting or running or batch:
            while waiting and len(running) < batch_size * max_concurrent_batches:
                sampled = gather_trajectory_groups([waiting.pop(0)], pbar_desc=None, max_exceptions=math.inf)
                running.add(asyncio.create_task(sampled))
            if running and len(batch) < batch_size:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                batch += [group for task in done for group in task.result()]
                bar.update(len(done))
                continue
            ready, batch = batch[:batch_size], batch[batch_size:]
            _check(ready, max_batch_exceptions)
            yield ready
    finally:
        bar.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        close_groups(waiting)


def _check(batch: list[TrajectoryGroup], limit: float) -> None:
    failures = [failure for group in batch for failure in group.exceptions]
    if 0 < limit < 1:
        limit *= sum(len(group) + len(group.exceptions) for group in batch)
    if len(failures) > limit:
        raise ArtError(
            f"{len(failures)} rollouts of a batch failed, max_batch_exceptions allows {limit:g}. The first:\n"
            f"{failures[0].traceback or failures[0].message}"
        )
