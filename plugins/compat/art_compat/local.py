"""`art.LocalBackend`: the client's local backend with ART's arguments and methods."""

# pyright: reportPrivateUsage=false

import logging
import os
from collections.abc import Sequence
from typing import Self

from art.core import local as core
from art.reporting import OnStep
from art_compat.backends import Backend

logger = logging.getLogger("art.compat")


class LocalBackend(core.LocalBackend, Backend):
    """`in_process`, `enable_expert_replay` and `gpu_cost_per_hour_usd` have no effect: the server is always a process.
    `with` is for programs without `async with`: the server starts with the first `register`."""

    def __init__(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        in_process: bool = False,
        server_args: Sequence[str] = (),
        start_timeout_seconds: float = 600,
        trackers: Sequence[str] = (),
        on_step: OnStep | None = None,
        gpu_cost_per_hour_usd: float | None = None,
        enable_expert_replay: bool = True,
    ) -> None:
        if gpu_cost_per_hour_usd is not None:
            logger.warning(
                "LocalBackend: gpu_cost_per_hour_usd has no effect: model.metrics_builder().add_cost('gpu', usd) counts it"
            )
        super().__init__(
            path=path,
            server_args=server_args,
            start_timeout_seconds=start_timeout_seconds,
            trackers=trackers,
            on_step=on_step,
        )

    def __enter__(self) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride] - this backend is for both
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the server, which ends all connections."""
        self._stop()

    async def _start(self) -> None:
        await self.start()
