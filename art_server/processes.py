"""The server's engine and trainer, and what they share: the device, the ledger, the pause gate, background tasks,
reports."""

import asyncio
import functools
import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

from art_server.background import Background, LoopWatch
from art_server.children import Children
from art_server.device.assignment import check_devices, device_environment
from art_server.device.owner import DeviceOwner
from art_server.device.probe import probe
from art_server.engine.engine import Engine
from art_server.engine.pause_gate import PauseGate
from art_server.jobs.gap_bars import bars_of
from art_server.jobs.reports import Reports, Totals
from art_server.jobs.trainer import Trainer
from art_server.ledger.intake import Intake
from art_server.ledger.ledger import Ledger, Retention
from art_server.settings import ServerConfig
from art_server.store import files

logger = logging.getLogger(__name__)


class Figures(NamedTuple):
    """Numbers of this moment, and since the server's start."""

    num_waiting: int
    """Requests at the pause gate."""
    num_running: int
    """Requests that the engine has."""
    num_engine_starts: int
    num_faults: Mapping[str, int]
    """Errors of background work, by its name."""
    totals: Totals


class Processes:
    """Takes the server's folder and kills the processes that an earlier server left there. Starts nothing itself.

    Raises:
        Conflict: another server has the folder.
        UsageError: a configured device does not exist.
    """

    def __init__(self, config: ServerConfig):
        self._lock_file = files.lock_folder(config.server_dir)
        self.machine = machine = probe()
        check_devices(config, machine)
        self.owner = DeviceOwner()
        self.background = Background()
        self.loop_watch = LoopWatch()
        self.gate = PauseGate()
        self.reports = Reports(config.trackers, config.log_dir)
        children = Children(config.server_dir, config.log_dir)
        if left := children.reap():
            logger.warning("killed processes that an earlier server left running: %s", left)
        retention = Retention(
            config.ledger_max_age_days * 86400.0, int(config.ledger_max_gb * 2**30)
        )
        self.ledger = Ledger(config.server_dir / "ledger.sqlite", retention, config.splicing)
        self.engine = Engine(
            config,
            machine.kind,
            device_environment(config.serve_devices, machine),
            self.owner,
            children,
            Intake(self.ledger, self.background).receiver(),
            lambda: self.gate.num_inside > 0,
            self.background,
            functools.partial(bars_of, config, machine.kind),
        )
        for_trainer = device_environment(config.train_devices, machine)
        self.trainer = Trainer(config, machine.kind, for_trainer, children)

    def figures(self) -> Figures:
        """The numbers for Prometheus."""
        return Figures(
            self.gate.num_waiting,
            self.gate.num_inside,
            self.engine.num_starts,
            self.background.num_faults,
            self.reports.totals,
        )

    async def stop(self) -> None:
        """Ends both processes and all background tasks, and releases the folder."""
        await self.trainer.stop()
        await self.engine.stop()
        await self.background.stop()
        await asyncio.to_thread(self.reports.close)
        self.close()

    def close(self) -> None:
        """Releases the folder of a server that has started nothing."""
        self.ledger.close()
        os.close(self._lock_file)
