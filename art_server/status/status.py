"""What the server does at this moment, for clients that wait and for people who look."""

from pathlib import Path
from typing import Any

from art_protocol.wire import Health, ReplicaHealth
from art_server import __version__
from art_server.engine.fleet import Fleet
from art_server.engine.pause_gate import PauseGate
from art_server.jobs.runner import JobRunner
from art_server.jobs.trainer import ServerTrainer
from art_server.models.base_loader import BaseLoader
from art_server.process.background import Background, LoopWatch
from art_server.status import machine
from art_server.status.activity import Activity, Doing


class Status:
    """Reads the server's parts and changes nothing."""

    def __init__(
        self,
        *,
        path: Path,
        fleet: Fleet,
        trainer: ServerTrainer,
        gate: PauseGate,
        base: BaseLoader,
        runner: JobRunner,
        loop_watch: LoopWatch,
        background: Background,
    ):
        self._path = path
        self._fleet = fleet
        self._trainer = trainer
        self._gate = gate
        self._base = base
        self._runner = runner
        self._loop_watch = loop_watch
        self._background = background
        self._activity = Activity(self._doing)

    def health(self, *, names_model: bool = True) -> Health:
        """The engine's state, the server's faults, and what requests wait for. Without `names_model` no model is named."""
        fleet, fetching, trained = self._fleet, self._base.fetch_progress, self._gate.model
        step = None
        if trained is not None:
            step = f"a step of '{trained}', which trains" if names_model else "a step, which trains"
        if fleet.base is None and fetching is not None:
            return Health(
                engine="starting",
                version=__version__,
                detail=fetching,
                waits_for=fetching,
                progress=fleet.progress.lines,
            )
        return Health(
            engine=fleet.state,
            base_model=fleet.base.name if fleet.base is not None else None,
            version=__version__,
            detail=fleet.detail,
            waits_for=step or fleet.start_waited_for or fleet.load_waited_for(names_model=names_model),
            progress=fleet.progress.lines,
            replicas=self._replicas(),
            longest_stall_seconds=self._loop_watch.longest_stall_seconds,
            faults=self._background.faults,
        )

    def _replicas(self) -> list[ReplicaHealth]:
        if len(self._fleet.replicas) == 1:
            return []
        return [
            ReplicaHealth(
                name=replica.name,
                engine=replica.state,
                detail=replica.detail,
                num_requests=replica.num_requests,
                num_starts=replica.num_starts,
            )
            for replica in self._fleet.replicas
        ]

    def activity(self) -> dict[str, Any]:
        """Where the time of the last minutes went (`Activity.report`)."""
        return self._activity.report()

    async def watch(self) -> None:
        """Samples the activity until it is cancelled."""
        await self._activity.run()

    def memory(self) -> dict[str, Any]:
        """Memory of the server's processes and free disk space (blocking)."""
        engines = {replica.name: replica.pid for replica in self._fleet.replicas}
        return machine.memory(self._path, engines | self._trainer.pids)

    def _doing(self) -> frozenset[Doing]:
        fleet, gate = self._fleet, self._gate
        activities: set[Doing] = {"waiting"} if gate.num_waiting else set()
        if fleet.state == "starting" or (fleet.base is None and self._base.fetch_progress is not None):
            activities.add("starting")
            return frozenset(activities)
        phase = self._runner.phase
        # The phases of `jobs/attempt.py` and of the trainer's `Progress`.
        if phase is not None and phase not in ("queued", "engine"):
            activities.add("swap" if phase in ("save", "load", "finish") else "training")
        # Requests that a step froze stay inside the gate.
        if gate.num_inside and gate.model is None:
            activities.add("rollouts")
        return frozenset(activities)
