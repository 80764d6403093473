"""What the server does now, for clients that wait and for people who look."""

from typing import Any

from art_protocol.wire import Health
from art_server import __version__
from art_server.base_loader import BaseLoader
from art_server.jobs.runner import JobRunner
from art_server.observe import machine
from art_server.observe.activity import Activity, Doing
from art_server.processes import Processes
from art_server.settings import ServerConfig


class State:
    """Reads the server's parts and changes nothing."""

    def __init__(
        self, config: ServerConfig, processes: Processes, base: BaseLoader, runner: JobRunner
    ):
        self._path = config.path
        self._processes = processes
        self._base = base
        self._runner = runner
        self._activity = Activity(self._doing)
        self.activity = self._activity.report
        self.watch = self._activity.run
        """Samples the activity until it is cancelled."""

    @property
    def base_name(self) -> str | None:
        """The name of the loaded base model."""
        base = self._processes.engine.base
        return base.name if base is not None else None

    def health(self) -> Health:
        """The engine's state, the server's faults, and what requests wait for."""
        engine, download = self._processes.engine, self._base.download
        if engine.base is None and download is not None:
            return Health(
                engine="starting",
                version=__version__,
                detail=download,
                waits_for=download,
                progress=engine.progress.lines,
            )
        return Health(
            engine=engine.state,
            base_model=self.base_name,
            version=__version__,
            detail=engine.detail,
            waits_for=self._processes.gate.waits_for or engine.start_waited_for,
            progress=engine.progress.lines,
            longest_stall_seconds=self._processes.loop_watch.longest_stall_seconds,
            faults=self._processes.background.faults,
        )

    def memory(self) -> dict[str, Any]:
        """Memory of the server's processes and free disk space (blocking)."""
        engine, trainer = self._processes.engine.pid, self._processes.trainer.pid
        return machine.memory(self._path, {"engine": engine, "trainer": trainer})

    def _doing(self) -> frozenset[Doing]:
        engine, gate = self._processes.engine, self._processes.gate
        found: set[Doing] = {"waiting"} if gate.num_waiting else set()
        if engine.state == "starting" or (engine.base is None and self._base.download is not None):
            found.add("starting")
            return frozenset(found)
        phase = self._runner.phase
        if phase is not None and phase not in ("queued", "engine"):
            found.add("swap" if phase in ("save", "load", "finish") else "training")
        if gate.num_inside and gate.waits_for is None:
            found.add("rollouts")
        return frozenset(found)
